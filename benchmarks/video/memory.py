"""Measure the peak memory of a process and its children."""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType

import psutil

INTERVAL = 0.02  # seconds between two samples


class Peak:
    """Samples memory while the block runs. Shared memory counts once (PSS), and mapped files such as libraries do not.

    The share of a library that counts for a process changes when a process of somebody else loads the same one.

    Attributes:
        peak_bytes: most bytes that the processes held while the block ran.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._stopped = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Peak:
        self.peak_bytes = held()
        self._sampler.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stopped.set()
        self._sampler.join()
        self.peak_bytes = max(self.peak_bytes, held())

    def _sample(self) -> None:
        while not self._stopped.wait(INTERVAL):
            self.peak_bytes = max(self.peak_bytes, held())


def held() -> int:
    """Return the bytes that this process and its children hold now."""
    me = psutil.Process()
    return sum(_pss(process.pid) for process in (me, *me.children(recursive=True)))


def _pss(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has just ended
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
