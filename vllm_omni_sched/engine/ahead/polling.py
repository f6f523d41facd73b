"""Readers of vLLM's message queues sleep between two looks, where polling takes processors that others need.

The engine core polls for the end of each step, and workers in processes of their own for the next one. On CPUs, a
polling engine core leaves a client or a proxy on the same few cores too little time, so that it has its tokens in
bursts (`benchmarks.streaming`); and what polls beside an encode takes time from the encoder processes, whose priority
is lower.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Protocol
from weakref import ref

from vllm_omni_sched import compat
from vllm_omni_sched.clock import monotonic_seconds, sleep_seconds
from vllm_omni_sched.imports import wrap_once

BESIDE_ENCODE_SECONDS = 0.0005
"""Time between two looks of a reader beside an encode: much less than a step, and much more than what a look takes."""
CORE_SECONDS = 1e-6
"""Time between two looks of the engine core otherwise; Linux makes about 50 µs of it."""
POLLED_SECONDS = 0.001
"""Time for which the engine core polls before it sleeps: the shortest steps end sooner."""
NEW_WAIT_SECONDS = 0.0002
"""Time without a look after which a wait is another one: looks of one wait are some microseconds apart."""


class Encoder(Protocol):
    """Knows whether an encode is under way that needs this machine's processors."""

    @property
    def encoding(self) -> bool: ...


class Readers:
    """Makes the readers of message queues in one process wait between two looks.

    Attributes:
        rest: whether they sleep also while nothing is encoded, in waits of more than `POLLED_SECONDS`.
    """

    def __init__(self) -> None:
        self.rest = False
        self._encoders: list[ref[Encoder]] = []
        self._began = self._looked = 0.0  # the present wait, and its last look

    def beside(self, encoder: Encoder) -> None:
        """Let them sleep while it is encoding, as long as it exists."""
        self._encoders.append(ref(encoder, self._encoders.remove))

    def look_again(self, sched_yield: Callable[[], None]) -> None:
        """Wait until the next look: in a loop, so that it should take little time itself."""
        for known in self._encoders:
            encoder = known()
            if encoder is not None and encoder.encoding:
                sleep_seconds(BESIDE_ENCODE_SECONDS)
                return
        if not self.rest:
            sched_yield()
            return
        now = monotonic_seconds()
        if now - self._looked > NEW_WAIT_SECONDS:
            self._began = now
        if now - self._began > POLLED_SECONDS:
            sleep_seconds(CORE_SECONDS)
            now = monotonic_seconds()  # what a sleep takes does not begin another wait
        else:
            sched_yield()
        self._looked = now


_readers = Readers()


def sleep_beside(encoder: Encoder) -> None:
    """Let the readers of message queues in this process sleep between two looks, from now on, while it is encoding."""
    _wrap()
    _readers.beside(encoder)


def rest_between_looks() -> None:
    """Let the readers of message queues in this process sleep between two looks, from now on, in any longer wait."""
    _wrap()
    _readers.rest = True


def _wrap() -> None:
    wrap_once(import_module(compat.SHM_BROADCAST), "sched_yield", _look_again)


def _look_again(sched_yield: Callable[[], None]) -> Callable[[], None]:
    def wrapper() -> None:
        _readers.look_again(sched_yield)

    return wrapper
