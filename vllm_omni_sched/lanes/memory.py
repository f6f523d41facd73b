"""Measures how much memory a job of a lane takes, in the process that works."""

import contextlib
import ctypes
from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # of Linux: the largest resident memory so far becomes the present one


class MemoryPeak:
    """Measures the resident memory of this process during one job after the other.

    The first job is not measured: it also makes pages of the model's weights resident, which this process has from its
    parent.
    """

    def __init__(self) -> None:
        self._before: int | None = None
        self._first = True
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # None without glibc

    def begin(self) -> None:
        """Note the memory before a job."""
        self._before = None
        if self._first:
            self._first = False
            return
        with contextlib.suppress(OSError):  # a sandbox may hide these files: nothing is measured there
            _CLEAR.write_text(_RESET_PEAK)
            self._before = _resident("VmRSS")

    def end(self) -> int:
        """Return by how many bytes the memory has grown at most since `begin`; 0 if it was not measured."""
        if self._before is None:
            return 0
        with contextlib.suppress(OSError):
            return max(0, _resident("VmHWM") - self._before)
        return 0

    def give_back(self) -> None:
        """Return memory that the job has freed to the operating system, which the C library would keep for the next."""
        if self._trim is not None:
            self._trim(0)


def _resident(name: str) -> int:
    """Return a value of the process status, in bytes."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0
