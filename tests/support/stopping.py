"""Stop a process, so that it stands still for sure."""

import os
import signal
from pathlib import Path

from tests.support.until import until


def stop(pid: int) -> None:
    """Stop a process; returns when all of its threads stand still: each may go on until it is told."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: all(map(_stands, Path(f"/proc/{pid}/task").iterdir())))


def _stands(task: Path) -> bool:
    try:
        stat = (task / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # the thread has ended
        return True
    return stat.rpartition(")")[2].split()[0] == "T"
