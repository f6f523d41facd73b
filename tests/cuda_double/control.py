"""Set and read the state of the CUDA double in this process."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from tests.cuda_double.build import DRIVER, NVML, RUNTIME, folder


class Counts(ctypes.Structure):
    """Counts of what the double has done in this process."""

    _fields_ = [
        (name, ctypes.c_long)
        for name in ("copies", "fills", "kernels", "refused", "waits", "records", "opened", "closed", "staged")
    ]


@lru_cache
def runtime() -> Any:
    """Return the runtime that torch uses."""
    library = ctypes.CDLL(str(folder() / RUNTIME))
    library.cuda_double_hold.argtypes = [ctypes.c_void_p, ctypes.c_int]
    library.cuda_double_set_memory_bound.argtypes = [ctypes.c_size_t]
    return library


def load_nvml() -> None:
    """Load the double of NVML, so that `pynvml` finds it by its name."""
    ctypes.CDLL(str(folder() / NVML), mode=ctypes.RTLD_GLOBAL)


def load_driver() -> None:
    """Load the double of the driver, so that `cuda.bindings` finds it by its name."""
    ctypes.CDLL(str(folder() / DRIVER))


def counts() -> Counts:
    found = Counts()
    runtime().cuda_double_counts(ctypes.byref(found))
    return found


def mend() -> None:
    """Forget the errors of all devices, and let everything that is held go on."""
    runtime().cuda_double_mend()


def hold(stream: Any) -> None:
    """Let no operation of a stream begin until `let_go`."""
    assert runtime().cuda_double_hold(stream.cuda_stream, 1) == 0


def let_go(stream: Any) -> None:
    assert runtime().cuda_double_hold(stream.cuda_stream, 0) == 0


@contextmanager
def holding(stream: Any) -> Iterator[None]:
    hold(stream)
    try:
        yield
    finally:
        let_go(stream)


@contextmanager
def holding_all() -> Iterator[None]:
    """Let no operation of any device begin."""
    runtime().cuda_double_hold_all(1)
    try:
        yield
    finally:
        runtime().cuda_double_hold_all(0)


def set_memory_bound(num_bytes: int) -> None:
    """Set the memory of each device, of this process."""
    runtime().cuda_double_set_memory_bound(num_bytes)


def set_multiprocessors(count: int) -> None:
    """Set the number of multiprocessors of each device, of this process; torch asks for it once."""
    runtime().cuda_double_set_multiprocessors(count)
