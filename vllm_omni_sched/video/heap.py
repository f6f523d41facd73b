"""Settings of the C library's heap in a decoder process.

A decoder's frames are large, so that by default each would be memory of its own, mapped for every piece and unmapped
after it: page faults take some percent of the decoding time. With these settings, memory is kept until a video ends.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
_NEVER = 1 << 30
_libc = ctypes.CDLL(None)


def keep() -> bool:
    """Make the heap keep freed memory from now on; return whether this C library supports it."""
    try:
        return bool(_libc.mallopt(_MMAP_THRESHOLD, _NEVER)) and bool(_libc.mallopt(_TRIM_THRESHOLD, _NEVER))
    except AttributeError:  # musl
        return False


def give_back() -> None:
    """Return free memory to the system."""
    try:
        _libc.malloc_trim(ctypes.c_size_t(0))
    except AttributeError:
        return
