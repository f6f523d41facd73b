"""The order in which jobs of the preprocessing pool start. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from vllm_omni_sched.graph.order import SlaClass, WaitingOrder, WaitingRequest


class Outcome(str, Enum):
    """How a job of the pool ended; the label of the metric."""

    DONE = "done"
    BAD_INPUT = "bad_input"  # its items cannot be prepared
    UNSUPPORTED = "unsupported"  # a value cannot be sent between processes: vLLM prepares the items itself
    DEADLINE = "deadline"  # not in time
    CANCELLED = "cancelled"  # nobody waits for it any more
    DIED = "died"  # two processes died while working on it
    MEMORY = "memory"  # a process did not have the memory
    FAILED = "failed"  # any other error in the process
    CLOSED = "closed"  # the pool was closed


class Verdict(str, Enum):
    """Whether a job starts now, and the reason."""

    NEEDED = "needed"  # the front end's thread waits for it
    NEXT = "next"  # the first of its class
    FULL = "full"  # no room for its result: it waits
    NOTHING = "nothing"  # no job waits


@dataclass(frozen=True)
class Waiting:
    """Snapshot of a waiting job; times are in seconds of the same clock.

    ``needed``: a thread of the front end waits for it and serves nobody else meanwhile, or it starts once more.
    """

    task: int
    sla: SlaClass
    arrival: float
    deadline: float
    needed: bool = False


class JobOrder:
    """Decides which waiting job starts next.

    1. A job that a thread of the front end waits for, or whose process died, goes first, the oldest first, whether or
       not there is room: that thread would otherwise keep the results of others from being taken.
    2. Any other job starts only if there is room: results that were not taken yet, and for each running job as much as
       the largest result so far, are less than ``max_bytes``.
    3. Jobs go by class, realtime first; within a class by deadline. A job that has waited ``max_wait_seconds`` goes
       before those of all classes.
    4. A job whose deadline has passed never starts: `expired` returns it, and it fails.
    5. At most ``max_waiting`` jobs wait, besides those that are needed.
    6. Processors are shared evenly by the processes; while no job waits, by those that work: see `threads`.
    """

    def __init__(self, max_bytes: int, max_waiting: int, max_wait_seconds: float) -> None:
        self.max_bytes, self.max_waiting = max_bytes, max_waiting
        self._order = WaitingOrder(max_wait_seconds)
        self._waiting: dict[int, Waiting] = {}
        self._largest = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, job: Waiting) -> bool:
        """Add a job, and return True; return False if too many wait (rule 5)."""
        if not job.needed and len(self._waiting) >= self.max_waiting:
            return False
        self._waiting[job.task] = job
        return True

    def remove(self, task: int) -> bool:
        """Remove a job; return whether it waited."""
        return self._waiting.pop(task, None) is not None

    def ended(self, result_bytes: int) -> None:
        """Note the size of a result."""
        self._largest = max(self._largest, result_bytes)

    def expired(self, now: float) -> list[int]:
        """Remove and return the jobs whose deadline has passed (rule 4)."""
        late = [task for task, job in self._waiting.items() if now > job.deadline]
        for task in late:
            del self._waiting[task]
        return late

    def next(self, now: float, held_bytes: int, running: int) -> tuple[int | None, Verdict]:
        """Remove and return the job that starts now, if one does, and the reason.

        Args:
            held_bytes: results that were not taken yet.
            running: number of running jobs.
        """
        if not self._waiting:
            return None, Verdict.NOTHING
        needed = [job for job in self._waiting.values() if job.needed]
        if needed:
            first, verdict = min(needed, key=lambda job: (job.arrival, job.task)), Verdict.NEEDED
        elif (held_bytes or running) and held_bytes + (running + 1) * self._largest > self.max_bytes:
            return None, Verdict.FULL
        else:
            first, verdict = (
                min(self._waiting.values(), key=lambda job: self._order.key(_request(job), now)),
                Verdict.NEXT,
            )
        del self._waiting[first.task]
        return first.task, verdict

    def threads(self, processors: int, processes: int, running: int) -> int:
        """Return how many threads each running job may use (rule 6)."""
        sharing = processes if self._waiting else min(max(1, running), processes)
        return max(1, processors // sharing)

    def next_deadline(self) -> float | None:
        """Return the earliest deadline of a waiting job; None if none waits."""
        return min((job.deadline for job in self._waiting.values()), default=None)


def _request(job: Waiting) -> WaitingRequest:
    return WaitingRequest(f"{job.task:020d}", job.arrival, job.sla, deadline=job.deadline)
