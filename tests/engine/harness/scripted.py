"""`python -m tests.engine.harness.scripted PLAN.json RESULT.json`: run an engine that does what a script says.

PLAN.json: `{"model", "args", "omni_sched": options or None, "meet": folder, "processes": number, "script": [action]}`;
an action is a list:

- `["ask", id, prompt, pictures, uuids]`: ask, and wait for the answer. A picture is `[number, width, height]`; `uuids`:
  names that the client gives the pictures, or None.
- `["ask under hash", id, prompt, pictures, others]`: the same; the names are the hashes that vLLM makes of others.
- `["change", seed]`: change the weights of the encoder through `collective_rpc`.
- `["apply", seed]`: the same through `apply_model`.
- `["call", name, arguments]`: call a method of vLLM's `LLMEngine`, or one of its `EngineCore` if it has none.
- `["meet", name]`: wait until all processes have come here.
- `["count", name]`: note the counts of the scheduler's metrics under this name.

RESULT.json: `{"answers": {id: Heard}, "counts": {name: counts}, "error": traceback or None}`.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dev.child_process import ChildProcess
from tests.engine.harness.inproc import InProcessEngine, sampling_params
from tests.engine.harness.processes import ENVIRONMENT, IN_PROCESS, NO_PLUGIN, OUR_PLUGIN
from tests.engine.harness.spec import OURS, EngineSpec
from tests.engine.harness.workload import Heard
from tests.support.warm import WarmPopen

MAX_STEPS = 3000
AT_MOST_SECONDS = 600.0
TOKENS = 6


class Scripted:
    """One process whose engine follows a script; ``omni_sched`` None: stock's."""

    def __init__(
        self,
        folder: Path,
        model: str,
        args: dict[str, Any],
        omni_sched: dict[str, Any] | None,
        script: list[list[Any]],
        *,
        meet: Path | None = None,
        processes: int = 1,
    ) -> None:
        folder.mkdir()
        plan = {"model": model, "args": args, "omni_sched": omni_sched, "script": script}
        plan |= {"meet": str(meet or folder), "processes": processes}
        (folder / "plan.json").write_text(json.dumps(plan))
        self._result = folder / "result.json"
        self.process = ChildProcess(
            [sys.executable, "-m", "tests.engine.harness.scripted", str(folder / "plan.json"), str(self._result)],
            log=folder / "log",
            env={**ENVIRONMENT, **IN_PROCESS, **(NO_PLUGIN if omni_sched is None else OUR_PLUGIN)},
            start=WarmPopen,
        )

    def result(self) -> dict[str, Any]:
        """Return what it has written; raises `AssertionError` if it did not end well."""
        assert self.process.exit_code == 0, "\n".join(self.process.last_lines(60))
        found: dict[str, Any] = json.loads(self._result.read_text())
        assert found["error"] is None, found["error"]
        return found


def main(plan_file: str, result_file: str) -> None:
    plan = json.loads(Path(plan_file).read_text())
    result: dict[str, Any] = {"answers": {}, "counts": {}, "error": None}
    spec = EngineSpec(
        "scripted",
        plan["model"],
        (),
        scheduler=OURS if plan["omni_sched"] is not None else None,
        omni_sched=plan["omni_sched"],
        args=plan["args"],
    )
    try:
        with closing(InProcessEngine(spec)) as engine:
            for action in plan["script"]:
                print(action, flush=True)
                act(engine, plan, action, result)
                Path(result_file).write_text(json.dumps(result))
    except Exception:  # noqa: BLE001  whatever it is, the test that reads the result shows it
        result["error"] = traceback.format_exc()
        print(result["error"], flush=True)
    Path(result_file).write_text(json.dumps(result))


def act(here: InProcessEngine, plan: dict[str, Any], action: list[Any], result: dict[str, Any]) -> None:
    match action:
        case ["ask", str(name), prompt, pictures, uuids]:
            result["answers"][name] = ask(here, name, prompt, pictures, uuids)
        case ["ask under hash", name, prompt, pictures, others]:
            uuids = [hash_of(here, one) for one in others]
            result["answers"][name] = ask(here, name, prompt, pictures, uuids)
        case ["change", seed]:
            here.engine.collective_rpc(change_encoder, args=(seed,))
        case ["apply", seed]:
            here.engine.apply_model(partial(add_noise, seed=seed))
        case ["call", name, arguments]:
            method = getattr(here.engine, name, None) or getattr(here.core, name)
            method(**arguments)
        case ["meet", name]:
            meet(Path(plan["meet"]), name, plan["processes"])
        case ["count", name]:
            result["counts"][name] = counts(here)
        case _:
            raise ValueError(f"no such action: {action}")


def ask(
    here: InProcessEngine, name: str, prompt: str, pictures: list[list[int]], uuids: list[str] | None
) -> dict[str, Any]:
    """Ask, and return the answer."""
    heard, request = Heard(), dict[str, Any](prompt=prompt)
    if pictures:
        request["multi_modal_data"] = {"image": [picture(*one) for one in pictures]}
    if uuids is not None:
        request["multi_modal_uuids"] = {"image": uuids}
    here._add(name, request, TOKENS)
    for _ in range(MAX_STEPS):
        for output in here.engine.step():
            heard.extend(output.outputs[0])
        if heard.finish_reason is not None:
            break
    else:
        raise TimeoutError(f"no answer to {name} after {MAX_STEPS} steps")
    for _ in range(4):  # what was in flight when it ended
        here.engine.step()
    return asdict(heard)


def hash_of(here: InProcessEngine, of: list[int]) -> str:
    """Return the identifier that vLLM gives a picture whose client gives it none."""
    request = here.engine.input_processor.process_inputs(
        "hash",
        {"prompt": "<|image_pad|>", "multi_modal_data": {"image": [picture(*of)]}},
        sampling_params(1),
        here.engine.get_supported_tasks(),
    )
    identifier: str = request.mm_features[0].identifier
    return identifier


def picture(number: int, width: int, height: int) -> Any:
    from PIL import Image

    pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def change_encoder(worker: Any, seed: int) -> None:
    """Change the weights of the encoder; called in the worker."""
    add_noise(worker.get_model(), seed)


def add_noise(model: torch.nn.Module, seed: int) -> None:
    """Add noise to all weights of the encoder that vLLM has not packed."""
    decodes = {id(one) for one in model.get_language_model().parameters()}
    noise = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if id(parameter) not in decodes and parameter.numel():
            parameter.data.add_(torch.randn(parameter.shape, generator=noise) * parameter.abs().mean())


def counts(here: InProcessEngine) -> dict[str, Any]:
    """Return the counts of our scheduler's metrics that are numbers, or numbers by reason."""
    from vllm_omni_sched.engine.build import refresh

    omni = getattr(here.core.scheduler, "omni", None)
    if omni is None:
        return {}
    refresh(omni.metrics, here.core.scheduler.encoder_cache_manager, None, omni.keepers)
    found = {name: getattr(omni.metrics, name) for name in dir(omni.metrics) if not name.startswith("_")}
    return {name: value for name, value in found.items() if _is_number(value) or _are_numbers(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_number, value.values()))


def meet(folder: Path, name: str, processes: int) -> None:
    folder.joinpath(f"{name}.{time.monotonic_ns()}").touch()
    end = time.monotonic() + AT_MOST_SECONDS
    while len(list(folder.glob(f"{name}.*"))) < processes:
        if time.monotonic() > end:
            raise TimeoutError(f"the other engines did not come to {name}")
        time.sleep(0.005)


if __name__ == "__main__":
    main(*sys.argv[1:])
