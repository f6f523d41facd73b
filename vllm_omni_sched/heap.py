"""The heap of the C library in processes that handle many large buffers, one after the other."""

from __future__ import annotations

import contextlib
import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
_NEVER = 1 << 30
_libc = ctypes.CDLL(None)


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
