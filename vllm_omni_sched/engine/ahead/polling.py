"""Readers of vLLM's message queues sleep while an encode is under way, instead of polling.

The engine core polls for the end of each step, and workers in processes of their own for the next one. On CPUs that
takes processor time from the encoder processes, whose priority is lower.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Protocol
from weakref import WeakSet

from vllm_omni_sched import compat
from vllm_omni_sched.clock import sleep_seconds
from vllm_omni_sched.imports import wrap_once

POLL_SECONDS = 0.0005
"""Time between two looks of a reader: much less than a step, and much more than what a look takes."""


class Encoder(Protocol):
    """Knows whether an encode is under way that needs this machine's processors."""

    @property
    def encoding(self) -> bool: ...


_encoders: WeakSet[Encoder] = WeakSet()


def sleep_beside(encoder: Encoder) -> None:
    """Let the readers of message queues in this process sleep between two looks, from now on, while it is encoding."""
    wrap_once(import_module(compat.SHM_BROADCAST), "sched_yield", _sleep_instead)
    _encoders.add(encoder)


def _sleep_instead(sched_yield: Callable[[], None]) -> Callable[[], None]:
    def wrapper() -> None:
        if any(encoder.encoding for encoder in _encoders):
            sleep_seconds(POLL_SECONDS)
        else:
            sched_yield()

    return wrapper
