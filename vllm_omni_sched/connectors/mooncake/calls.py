"""Calls that may hang, run with a deadline on separate threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from vllm_omni_sched.clock import Clock
from vllm_omni_sched.config.errors import RendezvousError, TransportClosedError

MAX_HANGING = 16
"""Largest number of calls that hang at a time; further ones are refused at once."""


class HangingError(RendezvousError):
    """A call took longer than its deadline, or too many calls hang already."""


class _Call:
    __slots__ = ("arguments", "done", "error", "function", "late", "lock", "over", "value")

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.function, self.arguments = function, arguments
        self.value: Any = None
        self.error: BaseException | None = None
        self.done = threading.Lock()  # held until there is a result
        self.done.acquire()
        self.lock = threading.Lock()
        self.over = False
        self.late: Callable[[Any], None] | None = None


class Calls:
    """Runner of calls with deadlines, which knows when none is in flight any more.

    1. A call that takes longer than its deadline goes on by itself; the caller gets an error.
    2. A caller may pass a function that runs when an abandoned call ends: memory that the call writes to is not free
       before.
    3. After `close` no call begins. `close` returns whether all have ended.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._idle: list[SimpleQueue[_Call | None]] = []
        self._ended = threading.Condition(self._lock)
        self._closed = False
        self.in_flight = 0
        self.hanging = 0
        self.gave_up = 0

    def run(
        self, seconds: float, function: Callable[..., Any], *arguments: Any, late: Callable[[Any], None] | None = None
    ) -> Any:
        """Call ``function`` and return its result.

        Args:
            seconds: how long it may take.
            late: called with the result (None if it raised) when it ends after all, on another thread; never when this
                returns, or raises what ``function`` did.

        Raises:
            HangingError: the call took longer, or it was not started because too many others hang; then ``late`` was
                called at once, with None, on this thread.
            TransportClosedError: after `close`; ``late`` is not called.
        """
        call = _Call(function, arguments)
        with self._lock:
            if self._closed:
                raise TransportClosedError("the transport to the Mooncake store was closed before this call")
            hanging = self.hanging
            if hanging < MAX_HANGING:
                self.in_flight += 1
                worker = self._idle.pop() if self._idle else None
        if hanging >= MAX_HANGING:
            if late is not None:
                late(None)
            raise HangingError(f"{hanging} calls into the Mooncake library hang")
        if worker is None:
            worker = SimpleQueue()
            threading.Thread(target=self._work, args=(worker,), name="mooncake-call", daemon=True).start()
        worker.put(call)
        if not call.done.acquire(timeout=max(seconds, 0.0)):
            with call.lock:
                if not call.over:
                    call.late = late
                    call.over = True
                    with self._lock:
                        self.hanging += 1
                        self.gave_up += 1
                    name = getattr(function, "__name__", "a call")
                    raise HangingError(f"the Mooncake library did not come back from {name} within {seconds:.1f} s")
        if call.error is not None:
            raise call.error
        return call.value

    def close(self, seconds: float) -> bool:
        """Refuse new calls, and wait up to ``seconds`` for those in flight; return whether all have ended."""
        until = self._clock() + seconds
        with self._lock:
            self._closed = True
            while self.in_flight and (left := until - self._clock()) > 0:
                self._ended.wait(left)
            idle, self._idle = self._idle, []
            ended = not self.in_flight
        for worker in idle:
            worker.put(None)
        return ended

    def _work(self, queue: SimpleQueue[_Call | None]) -> None:
        while (call := queue.get()) is not None:
            try:
                call.value = call.function(*call.arguments)
            except BaseException as error:  # noqa: BLE001 (it is raised where the call was made)
                call.error = error
            with call.lock:
                given_up, call.over = call.over, True
            if given_up and call.late is not None:
                call.late(call.value)
            with self._lock:
                self.in_flight -= 1
                self.hanging -= given_up
                ends = self._closed
                if ends:
                    self._ended.notify_all()
                else:
                    self._idle.append(queue)
            call.done.release()
            del call
            if ends:
                return
