"""Inject faults into the encoder process of one of two workers: a worker extension, whose import injects them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import torch

from tests.engine.harness.tensor_parallel import FAULTS


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _raise() -> None:
    raise ValueError("this picture is poisoned")


class Faults:
    """Extension of a worker; `_inject` has been called in its process."""

    model_runner: Any

    def meet_fault(self, fault: int) -> None:
        _FAULT[0] = fault

    def kill_lane(self) -> None:
        """Kill the lane's process of rank 1."""
        if _rank() == 1:
            os.kill(self.model_runner.omni.ahead.lane.pid, signal.SIGKILL)

    def kind_of_lane(self) -> str:
        return type(self.model_runner.omni.ahead.lane).__name__


_FAULT = torch.zeros(1, dtype=torch.int64).share_memory_()  # the lane's process sees it change


def _rank() -> int:
    from vllm_omni_sched import compat

    return int(compat.tensor_parallel_group().rank_in_group)


def _inject() -> None:
    """Let the lane's process of this worker meet the fault at the plain picture."""
    from vllm_omni_sched.engine.ahead.encode import Encode

    original, owner = Encode._encode, os.getpid()

    def call(self: Any, payload: Any, pause: Any) -> Any:
        fault = FAULTS[int(_FAULT[0])]
        here: Callable[[], None] = {"one raises": _raise, "all raise": _raise}.get(fault, _die)
        plain = os.getpid() != owner and _is_plain(payload)
        if plain and (fault == "all raise" or (fault in ("one dies", "one raises", "no lane") and _rank() == 1)):
            if fault == "no lane":
                os.kill(os.getppid(), signal.SIGKILL)  # the one that would start another
            here()
        result = original(self, payload, pause)
        if plain and fault == "one dies when it is done" and _rank() == 1:
            _die()
        return result

    Encode._encode = call  # type: ignore[method-assign]


def _is_plain(payload: Any) -> bool:
    if not isinstance(payload, tuple) or len(payload) != 2:
        return False
    pixels = payload[1]["pixel_values"].data
    return float((pixels.amax((-1, -2)) - pixels.amin((-1, -2))).max()) < 1e-3


_inject()
