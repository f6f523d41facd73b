"""Write the history of requests to a bounded file, for ``vllm-omni-sched explain``."""

from pathlib import Path

from vllm_omni_sched.bounded_log import BoundedLog
from vllm_omni_sched.clock import Clock
from vllm_omni_sched.core.engine.history import History, Transition
from vllm_omni_sched.core.engine.history_lines import LINES_LOST, HistoryLine, line_of

REPEATED = frozenset({Transition.HELD, Transition.ROUND, Transition.TAKEN, Transition.PLACED})
"""Transitions that a request may make in each step in which it waits."""


class HistoryFile(History):
    """A history whose entries go to a file, without waiting for the disk; none is kept in memory.

    1. Entries that concern an item alone are left out.
    2. An entry is left out if it repeats the last one of the same kind of its request, and its request did nothing else
       meanwhile but repeat itself: a request that is held in a thousand steps has one line.
    3. Times are those of the monotonic clock, moved to the wall clock once.

    Args:
        path: of the file; a second one is beside it (`.1`).
        max_bytes: of both files.
        wall, monotonic: the clocks; entries are given the time of the second.
    """

    def __init__(self, path: Path, max_bytes: int, wall: Clock, monotonic: Clock) -> None:
        super().__init__(0)
        self._ahead = wall() - monotonic()
        self._last: dict[str, dict[Transition, str]] = {}  # of each request, since it last did something new

        def lost(lines: int) -> bytes:
            return line_of(HistoryLine(wall(), LINES_LOST, detail=str(lines)))

        self._log = BoundedLog(path, max_bytes, "history of requests", lost)

    def add(self, now: float, transition: Transition, request_id: str, detail: str = "") -> None:
        """Write a transition, unless it is a repetition."""
        if not request_id:
            return
        if transition in REPEATED:
            last = self._last.setdefault(request_id, {})
            if last.get(transition) == detail:
                return
            last[transition] = detail
        else:
            self._last.pop(request_id, None)
        self._log.write(line_of(HistoryLine(self._ahead + now, transition.value, request_id, detail)))

    def close(self) -> None:
        """Write what is not written yet, and close the file."""
        self._log.close()


def path_of_rank(path: str, rank: int) -> Path:
    """Return the file of an engine of data parallelism: a file is written by one engine alone."""
    file = Path(path)
    return file.with_name(f"{file.stem}-{rank}{file.suffix}") if rank else file
