"""The most memory that a process and its children held at once."""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType

import psutil

INTERVAL = 0.02  # seconds between two looks


class Peak:
    """Looks at them while the block runs. What several share counts once (PSS).

    Attributes:
        most: bytes that they held at most while the block ran.
    """

    def __init__(self) -> None:
        self.most = 0
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Peak:
        self.most = held()
        self._watch.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._watch.join()
        self.most = max(self.most, held())

    def _look(self) -> None:
        while not self._over.wait(INTERVAL):
            self.most = max(self.most, held())


def held() -> int:
    """Bytes that this process and its children hold now."""
    me = psutil.Process()
    return sum(_pss(process.pid) for process in (me, *me.children(recursive=True)))


def _pss(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has just ended
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)
