"""Ask a pipeline for what it must refuse, in Python and over HTTP."""

from __future__ import annotations

import asyncio
import json
import socket
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from dev.omni_cpu.asking import Ask, sampling_params
from dev.omni_cpu.spec import PipelineSpec
from dev.omni_cpu.without_torchaudio import stand_in_for_torchaudio

REFUSED = {"unknown": {"omni_class": "vip"}, "not allowed": {"omni_class": "realtime"}, "misspelt": {"omni_usr": "u"}}
SERVED = {"allowed": {"omni_class": "batch", "omni_user": "anna"}, "somebody else's": {"steps": 3}}
PATHS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4},
    "/v1/completions": {"prompt": "hello", "max_tokens": 4},
    "/v1/responses": {"input": "hello", "max_output_tokens": 4, "store": False},
}
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
MODEL = "tiny"
ANSWER_SECONDS = 60


async def refused(omni: Any, spec: PipelineSpec, prefix: str) -> dict[str, Any]:
    """Return `{"said": {case: error before any answer}}`; no stage gets anything to do."""
    said = {}
    for name, extra in REFUSED.items():
        ask = Ask("What is asked in vain.", thinks=4, says=4)
        params = sampling_params(spec, ask)
        params[0].extra_args = extra
        try:
            answer = omni.generate(ask.prompt, request_id=f"{prefix}-{name}", sampling_params_list=params)
        except ValueError as error:
            said[name] = [type(error).__mro__[1].__name__, str(error)]
        else:
            await answer.aclose()
    return {"said": said}


async def refused_over_http(omni: Any, spec: PipelineSpec, prefix: str) -> dict[str, Any]:
    """Return `{"asked": [[path, stream, case, status, answer]]}` of all paths of vLLM-Omni's server."""
    asked = []
    async with _serving(omni) as port:
        for path, body in PATHS.items():
            for stream in (False, True):
                for case, xargs in (REFUSED | SERVED).items():
                    request = {"model": MODEL, "vllm_xargs": xargs, "stream": stream, "modalities": ["text"], **body}
                    status, answer = await asyncio.to_thread(_ask, port, path, request)
                    asked.append([path, stream, case, status, answer])
        params: list[dict[str, Any]] = [{"max_tokens": 4, "extra_args": REFUSED["unknown"]}]
        path, body = next(iter(PATHS.items()))
        status, answer = await asyncio.to_thread(
            _ask, port, path, {"model": MODEL, "sampling_params_list": params, "modalities": ["text"], **body}
        )
        asked.append([path, False, "unknown", status, answer])
    return {"asked": asked}


def _ask(port: int, path: str, body: dict[str, Any]) -> tuple[int, str]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@asynccontextmanager
async def _serving(omni: Any) -> AsyncIterator[int]:
    """Run the HTTP server of `vllm serve --omni` over a running pipeline, and yield its port."""
    stand_in_for_torchaudio()
    from vllm_omni.entrypoints.cli.serve import OmniServeCommand
    from vllm_omni.entrypoints.openai import api_server
    from vllm_omni.utils.tracking_parser import TrackingArgumentParser

    parser = TrackingArgumentParser()
    OmniServeCommand().subparser_init(parser.add_subparsers(dest="subparser"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        options = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL]
        args = parser.parse_args(["serve", str(omni.model), "--omni", *options, "--chat-template", TEMPLATE])
        args.model = args.model_tag

        @asynccontextmanager
        async def running(*_: Any, **__: Any) -> AsyncIterator[Any]:
            yield omni

        builds, api_server.build_async_omni = api_server.build_async_omni, running
        server = asyncio.create_task(api_server.omni_run_server_worker(f"http://127.0.0.1:{port}", listening, args))
        try:
            while True:
                if server.done():
                    raise RuntimeError("the server has ended") from server.exception()
                if await asyncio.to_thread(_is_healthy, port):
                    break
                await asyncio.sleep(0.1)
            yield port
        finally:
            server.cancel()
            await asyncio.gather(server, return_exceptions=True)
            api_server.build_async_omni = builds


def _is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


REFUSED_SCENARIO = {"refused": refused, "refused_over_http": refused_over_http}
