"""Time slices of threads: how long one runs before another of the same processor gets its turn."""

from __future__ import annotations

import ctypes
import os
import platform
import struct

_CALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}  # sched_setattr, sched_getattr
_ATTRIBUTES = struct.Struct("IIQiIQQQ")  # size, policy, flags, nice, priority, slice in nanoseconds, deadline, period
_libc = ctypes.CDLL(None, use_errno=True)


def prefer_short_slices(seconds: float) -> bool:
    """Ask Linux for time slices of this length, for this thread and its later children; return whether it agrees.

    The thread gets no more time than before. But when it wakes up, it runs at once, where it would otherwise wait until
    a thread that computes has used up its own slice, of some milliseconds. Kernels before 6.12 ignore the request.
    """
    if platform.machine() not in _CALLS or os.uname().sysname != "Linux":
        return False
    set_attributes, get_attributes = _CALLS[platform.machine()]
    data = ctypes.create_string_buffer(_ATTRIBUTES.size)
    if _libc.syscall(get_attributes, 0, data, _ATTRIBUTES.size, 0):
        return False
    _, policy, _, nice, priority, *_ = _ATTRIBUTES.unpack(data.raw)
    if policy != os.SCHED_OTHER:  # the operator's own choice
        return False
    data.raw = _ATTRIBUTES.pack(_ATTRIBUTES.size, policy, 0, nice, priority, round(seconds * 1e9), 0, 0)
    return not _libc.syscall(set_attributes, 0, data, 0)


def slice_seconds() -> float:
    """Return the time slice of this thread as the kernel reports it; 0 if it does not."""
    data = ctypes.create_string_buffer(_ATTRIBUTES.size)
    calls = _CALLS.get(platform.machine())
    if calls is None or _libc.syscall(calls[1], 0, data, _ATTRIBUTES.size, 0):
        return 0.0
    return float(_ATTRIBUTES.unpack(data.raw)[5]) / 1e9
