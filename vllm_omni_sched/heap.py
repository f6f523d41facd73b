"""The heap of the C library in processes that handle many large buffers, one after the other."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
_NEVER = 1 << 30
_MOST_THREADS = 64
_PROBE_BYTES = 1 << 16
_libc = ctypes.CDLL(None)
_libc.malloc.restype = ctypes.c_void_p
_libc.free.argtypes = [ctypes.c_void_p]


def keep_freed_memory() -> bool:
    """Make the C library's heap keep freed memory from now on; return whether this C library supports it.

    By default, each large buffer would be memory of its own, mapped when it is made and unmapped when it is freed. The
    page faults take some percent of the time to decode a video, and a third of the time to prepare a picture.
    """
    try:
        return bool(_libc.mallopt(_MMAP_THRESHOLD, _NEVER)) and bool(_libc.mallopt(_TRIM_THRESHOLD, _NEVER))
    except AttributeError:  # musl
        return False


def return_free_memory() -> None:
    """Return free memory of the heap to the system."""
    with contextlib.suppress(AttributeError):  # musl
        _libc.malloc_trim(ctypes.c_size_t(0))


def run_on_main_heap(function: Callable[[], None]) -> None:
    """Run a function in a thread that allocates from the main heap, if one can be had; else in this thread.

    A process that was forked from a thread has that thread's heap, which glibc divides into pieces of 64 MiB and unmaps
    piece by piece, whatever `keep_freed_memory` asks for. New threads of a fork take over the heaps of the threads that
    it has not inherited, one after the other, and one of these is the main heap.
    """
    if _on_main_heap():
        function()
        return
    release = threading.Event()
    for _ in range(_MOST_THREADS):
        attempt = _Attempt(function, release)
        attempt.start()
        if attempt.allocates_from_main_heap():
            release.set()
            attempt.join()
            return
    release.set()
    function()


class _Attempt(threading.Thread):
    """Runs the function if this thread has got the main heap; otherwise keeps its heap until the release."""

    def __init__(self, function: Callable[[], None], release: threading.Event) -> None:
        super().__init__(name="omni-sched-main-heap", daemon=True)
        self._function, self._release = function, release
        self._known, self._main = threading.Event(), False

    def allocates_from_main_heap(self) -> bool:
        """Return whether it does; the first thread that does runs the function."""
        self._known.wait()
        return self._main

    def run(self) -> None:
        self._main = _on_main_heap()
        self._known.set()
        if self._main:
            self._function()
        else:
            self._release.wait()


def _on_main_heap() -> bool:
    """Return whether this thread allocates from the heap that the system calls ``[heap]``."""
    address = _libc.malloc(_PROBE_BYTES)
    _libc.free(address)
    with open("/proc/self/maps") as maps:
        for line in maps:
            if line.rstrip().endswith("[heap]"):
                start, _, end = line.split(" ", 1)[0].partition("-")
                return int(start, 16) <= (address or 0) < int(end, 16)
    return False
