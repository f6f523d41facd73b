"""Run a real engine whose encoder process meets one fault after the other: `python -m … MODEL`, JSON on stdout.

Faults are injected where the lane's process calls the encoder; everything else is as served.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch
from PIL import Image

from tests.engine.harness.inproc import InProcessEngine
from tests.engine.harness.media import picture
from tests.engine.harness.spec import OURS, EngineSpec

PICTURES = {"good-1": 1, "bad": None, "good-2": 3, "good-3": 4}
PLAIN = Image.new("RGB", (28, 28), (200, 30, 90))


def _raise() -> None:
    raise ValueError("this picture is poisoned")


def _no_memory() -> None:
    raise torch.OutOfMemoryError("tried to allocate more than there is")


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_without_a_successor() -> None:
    os.kill(os.getppid(), signal.SIGKILL)  # the one that would start it
    _die()


FAULTS: dict[str, Callable[[], None]] = {
    "none": lambda: None,
    "raises": _raise,
    "no memory": _no_memory,
    "dies": _die,
    "dies without a successor": _die_without_a_successor,
}


def inject() -> torch.Tensor:
    """Let the encoder process meet a fault at the plain picture; returns the number of the fault, to be set."""
    from vllm_omni_sched.engine.ahead.worker import Encode

    stock, owner = Encode.__call__, os.getpid()
    fault = torch.zeros(1, dtype=torch.int64).share_memory_()  # the forked process sees it change

    def call(self: Any, payload: Any, pause: Any) -> Any:
        plain = False
        if payload is not None:
            pixels = payload[1]["pixel_values"].data
            plain = float((pixels.amax((-1, -2)) - pixels.amin((-1, -2))).max()) < 1e-3
        if plain and os.getpid() != owner:
            list(FAULTS.values())[int(fault[0])]()
        return stock(self, payload, pause)

    Encode.__call__ = call  # type: ignore[method-assign]
    return fault


def main() -> None:
    fault = inject()
    spec = EngineSpec(
        "faults",
        sys.argv[1],
        (),
        args={"max_model_len": 512, "enable_prefix_caching": False, "num_gpu_blocks_override": 200},
        scheduler=OURS,
        # nothing goes unnoticed under such a target: all of it goes to the lane
        omni_sched={"encode_ahead": True, "itl_target_ms": 0.01},
    )
    here = InProcessEngine(spec)
    found: dict[str, Any] = {"warm-up": warm_up(here)}
    for number, name in enumerate(FAULTS):
        fault[0] = number
        here.engine.reset_encoder_cache()
        found[name] = round_of(here)
    print(json.dumps(found))


def warm_up(here: InProcessEngine) -> list[Any]:
    """Return the errors of the warm-up job of the lane, which no request waits for; `[None]` if it succeeded."""
    lane = here.core.model_executor.driver_worker.worker.model_runner.omni.ahead._lane
    lane.wait(60.0)
    return [done.error and str(done.error) for done in lane.poll()]


def round_of(here: InProcessEngine) -> dict[str, Any]:
    """Run a text request beside four requests with a picture each, and return the results of each."""
    here._add("text", {"prompt_token_ids": list(range(5, 15))}, 60)
    for _ in range(3):
        here.engine.step()
    for id_, number in PICTURES.items():
        prompt = {
            "prompt": "<image>what is it",
            "multi_modal_data": {"image": PLAIN if number is None else picture(number)},
        }
        here._add(id_, prompt, 6)
    tokens: dict[str, list[int]] = {id_: [] for id_ in ("text", *PICTURES)}
    reasons: dict[str, str] = {}
    for _ in range(2000):
        for output in here.engine.step():
            tokens[output.request_id] += output.outputs[0].token_ids
            if output.outputs[0].finish_reason:
                reasons[output.request_id] = output.outputs[0].finish_reason
        if len(reasons) == len(tokens):
            break
    metrics = here.core.scheduler.omni.metrics
    return {
        "tokens": tokens,
        "reasons": reasons,
        "failed": metrics.ahead_failed,
        "encoded": metrics.ahead_encoded,
        "restarts": metrics.lane_restarts,
        "left": sorted(here.core.scheduler.requests),
    }


if __name__ == "__main__":
    main()
