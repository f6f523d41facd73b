"""`python -m tests.support.document_program JOBS.json`: run what documents show and what needs vLLM, in one process.

JOBS.json: a list of `{"kind": "serve" | "doctor" | "python", "folder": where it runs, ...}`. The last line that is
printed is a list with the result of each job: what its function returns, or `{"error": traceback}`.

- ``serve``: ``arguments`` of ``vllm``, ``variables``. vLLM's own command line reads them; an engine of this process
  then answers a question about a picture and one about a video, if ``model`` names a tiny model.
- ``doctor``: ``arguments`` of ``vllm-omni-sched``, ``variables``.
- ``python``: ``code``; ``clip``: file whose bytes it finds in ``chunks``.
"""

from __future__ import annotations

import base64
import io
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, chdir
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from dev.frozen_heap import freeze_for_good

TINY = {
    "enforce_eager": True,
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 4,
    "num_gpu_blocks_override": 64,  # else each engine begins with a gigabyte of zeros
    "skip_mm_profiling": True,
}


def read_by_vllm(arguments: list[str]) -> Any:
    """Return the arguments of a server as vLLM's command line hands them on; with ``--omni``, vLLM-Omni's."""
    from vllm.entrypoints.cli import main as command_line
    from vllm.entrypoints.cli.serve import ServeSubcommand

    found: list[Any] = []
    with ExitStack() as stack:
        if "--omni" in arguments:
            from dev.omni_cpu.without_torchaudio import stand_in_for_torchaudio

            stand_in_for_torchaudio()
            from vllm_omni.entrypoints.cli.serve import OmniServeCommand

            stack.enter_context(patch.object(OmniServeCommand, "cmd", staticmethod(found.append)))
        else:
            stack.enter_context(patch.object(ServeSubcommand, "cmd", staticmethod(found.append)))
        stack.enter_context(patch.object(sys, "argv", ["vllm", *arguments]))
        command_line.main()
    (args,) = found
    return args


def serve(arguments: list[str], model: str | None, clip: str, **_: Any) -> dict[str, Any]:
    """Read the arguments; with a tiny model, answer with the engine that they describe."""
    args = read_by_vllm(arguments)
    if model is None:
        return {"read": True}
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

    from vllm_omni_sched.engine.video.loader import FlashCodecLoader

    args.model = model
    for name, value in TINY.items():
        setattr(args, name, value)
    loaded: list[str] = []
    load = FlashCodecLoader.load_bytes

    def counted(*given: Any, **how: Any) -> Any:
        loaded.append("a video")
        return load(*given, **how)

    with patch.object(FlashCodecLoader, "load_bytes", counted):
        llm = LLM.from_engine_args(EngineArgs.from_cli_args(args))
        try:
            return _answers(llm, clip) | {"videos": len(loaded)}
        finally:
            llm.llm_engine.engine_core.shutdown()


def _answers(llm: Any, clip: str) -> dict[str, Any]:
    from vllm import SamplingParams

    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    asked = [_url("image", "image/png", _picture()), _url("video", "video/mp4", Path(clip).read_bytes())]
    tokens = []
    for item in asked:
        content = [item, {"type": "text", "text": "What is this?"}]
        (answer,) = llm.chat(
            [{"role": "user", "content": content}],
            SamplingParams(temperature=0, max_tokens=2, ignore_eos=True),
            use_tqdm=False,
        )
        tokens.append(len(answer.outputs[0].token_ids))
    return {
        "scheduler": _path(scheduler),
        "encoder_cache": _path(scheduler.encoder_cache_manager),
        "tokens": tokens,
    }


def _path(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _url(kind: str, mime: str, content: bytes) -> dict[str, Any]:
    url = f"data:{mime};base64,{base64.b64encode(content).decode()}"
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


def _picture() -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (56, 56), "teal").save(file, "PNG")
    return file.getvalue()


def doctor(arguments: list[str], **_: Any) -> dict[str, Any]:
    """Return what ``vllm-omni-sched doctor`` prints, and its exit status."""
    from typer.testing import CliRunner

    from vllm_omni_sched.cli import app

    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    return {"status": result.exit_code, "said": result.output}


def python(code: str, clip: str, model: str, **_: Any) -> dict[str, Any]:
    """Run a program; ``LLM`` of vLLM has a tiny model, whichever it is asked for."""
    import vllm

    content = Path(clip).read_bytes()
    made: list[Any] = []

    class Tiny(vllm.LLM):
        def __init__(self, _: str, **how: Any) -> None:
            super().__init__(model, **TINY, **how)
            made.append(self)

    names = {"__name__": "__main__", "chunks": [content[: len(content) // 2], content[len(content) // 2 :]]}
    try:
        with patch.object(vllm, "LLM", Tiny):
            exec(compile(code, "block", "exec"), names)
        return {"answers": [_answers(one, clip) for one in made]}
    finally:
        for one in made:
            one.llm_engine.engine_core.shutdown()


KINDS: Mapping[str, Callable[..., dict[str, Any]]] = {"serve": serve, "doctor": doctor, "python": python}


def results(jobs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the result of each job."""
    for job in jobs:
        print(f"=== {time.process_time():.1f} s so far: {job}", flush=True)
        freeze_for_good()
        run = partial(KINDS[job["kind"]], **{name: value for name, value in job.items() if name != "kind"})
        try:
            with chdir(job["folder"]), patch.dict(os.environ, job.get("variables", {})):
                yield run()
        except (Exception, SystemExit):  # noqa: BLE001  whatever it is, the test shows it
            yield {"error": traceback.format_exc()}


def main(file: str) -> None:
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    found = list(results(json.loads(Path(file).read_text())))
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
