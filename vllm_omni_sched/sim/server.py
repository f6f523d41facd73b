"""Define the interface of a simulated replica."""

from collections.abc import Callable, Mapping
from typing import Protocol

from vllm_omni_sched.sim.work import Request


class Job:
    """A request in one stage. The server sets the attributes below the line.

    ``cost_seconds``: estimated time in this stage; ``attempt``: the number of its dispatch.
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
        self.first = float("inf")  # time of the client's first output of this stage
        self.largest_gap = 0.0  # between two of its outputs, seconds


Done = Callable[[Job], None]

BESIDE = frozenset({"lane"})
"""Kinds of work whose seconds overlap with other kinds, since they run beside other work of the same device."""


def busy_in_all(busy: Mapping[str, float]) -> float:
    """Return the busy seconds without double counting."""
    return sum(seconds for work, seconds in busy.items() if work not in BESIDE)


class Server(Protocol):
    """Interface of one replica of a stage.

    It gets a callback for finished jobs, and calls it once for each job that it was given and that was not
    withdrawn by `kill` or `abort`.
    """

    @property
    def in_flight(self) -> int:
        """Return the number of its jobs."""

    def submit(self, job: Job) -> None:
        """Start or queue a job."""

    def abort(self, job: Job) -> None:
        """Forget a job; unknown ones are ignored."""

    def kill(self) -> list[Job]:
        """Kill the server and return its lost jobs in order of arrival."""

    def busy_seconds(self) -> dict[str, float]:
        """Return the device seconds up to now by kind of work, such as ``llm``, ``encode``, ``decode``.

        Kinds in `BESIDE` overlap with others.
        """
