"""The C library's heap of a decoder process.

A decoder's frames are large, so that each would be memory of its own, fresh from the system for every piece and given
back after it: page faults take some percent of the time of decoding. Here they stay until a video ends.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
_NEVER = 1 << 30
_libc = ctypes.CDLL(None)


def keep() -> bool:
    """From now on what is freed stays; whether this C library can do so."""
    try:
        return bool(_libc.mallopt(_MMAP_THRESHOLD, _NEVER)) and bool(_libc.mallopt(_TRIM_THRESHOLD, _NEVER))
    except AttributeError:  # musl
        return False


def give_back() -> None:
    """Give what is free to the system."""
    try:
        _libc.malloc_trim(ctypes.c_size_t(0))
    except AttributeError:
        return
