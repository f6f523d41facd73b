"""What does the work of a stage: the interface of a simulated replica."""

from collections.abc import Callable, Mapping
from typing import Protocol

from vllm_omni_sched.sim.work import Request


class Job:
    """A request in one stage. The server fills in what is below the line.

    ``cost_seconds``: what it is estimated to take here; ``attempt``: the number of its dispatch.
    """

    __slots__ = ("attempt", "cost_seconds", "first", "largest_gap", "replica", "request", "stage", "submitted")

    def __init__(self, request: Request, stage: int, cost_seconds: float = 0.0, attempt: int = 1) -> None:
        self.request = request
        self.stage = stage
        self.cost_seconds = cost_seconds
        self.attempt = attempt
        self.replica = -1
        self.submitted = 0.0
        # ----
        self.first = float("inf")  # when the client had its first output of this stage
        self.largest_gap = 0.0  # between two of its outputs, seconds


Done = Callable[[Job], None]

BESIDE = frozenset({"lane"})
"""Work of which seconds are counted elsewhere, too: it goes on beside other work of the same device."""


def busy_in_all(busy: Mapping[str, float]) -> float:
    """Return the seconds in which something was done, each once."""
    return sum(seconds for work, seconds in busy.items() if work not in BESIDE)


class Server(Protocol):
    """One replica of a stage.

    It is given what to call when a job is done, and calls that once for each job that it was given and that was not
    taken back by `kill` or `abort`.
    """

    @property
    def in_flight(self) -> int:
        """Jobs that it has."""

    def submit(self, job: Job) -> None:
        """Take a job on, now."""

    def abort(self, job: Job) -> None:
        """Forget a job; nothing if it is not here."""

    def kill(self) -> list[Job]:
        """Die: what it had is lost, and returned in the order in which it came."""

    def busy_seconds(self) -> dict[str, float]:
        """Device seconds so far, up to now, by what they went to, such as ``llm``, ``encode``, ``decode``; those in
        `BESIDE` are counted under another name as well."""
