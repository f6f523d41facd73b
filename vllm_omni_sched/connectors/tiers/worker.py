"""The thread that moves messages in the background."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Worker:
    """Calls a function in a thread of its own, now and then while that says that there is more to do, or when woken.

    The thread is started when it is woken first. Nothing that the function raises ends it.

    Args:
        work: whether it should be called again soon.
        interval_seconds: what soon is.
    """

    def __init__(self, work: Callable[[], bool], interval_seconds: float) -> None:
        self._work, self._interval = work, interval_seconds
        self._event, self._closed = threading.Event(), threading.Event()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self.failures = 0

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def wake(self) -> None:
        """There is something to do."""
        if not self._event.is_set():
            self._event.set()
        if self._thread is None:
            with self._starting:
                if self._thread is None and not self._closed.is_set():
                    self._thread = threading.Thread(target=self._run, name="tiers", daemon=True)
                    self._thread.start()

    def close(self) -> None:
        """End the thread, once it has done what it is doing."""
        with self._starting:
            self._closed.set()
        self._event.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        more = False
        while True:
            self._event.wait(self._interval if more else None)
            self._event.clear()
            if self._closed.is_set():
                return
            try:
                more = self._work()
            except Exception:
                self.failures += 1
                logger.exception("messages could not be moved between tiers; it is tried again")
                more = True
            if self._closed.wait(self._interval):
                return
