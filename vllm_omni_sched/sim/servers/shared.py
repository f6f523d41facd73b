"""A server that all its jobs share."""

from collections.abc import Callable
from heapq import heappop, heappush
from random import Random  # noqa: TID251 (the type of an argument)

from vllm_omni_sched.sim.kernel import Simulator
from vllm_omni_sched.sim.server import Done, Job


class SharedServer:
    """Egalitarian processor sharing: each of n jobs has 1/n of the server, all the time.

    Exact, by virtual time (Parekh and Gallager, "A Generalized Processor Sharing Approach to Flow Control", 1993): it
    runs at 1/n, a job that needs s seconds ends s after it came, and so the order of ends never changes. O(log n) for
    each job.

    Args:
        service: seconds of a job that is alone, above 0; asked when it comes.
    """

    __slots__ = (
        "_busy",
        "_done",
        "_due",
        "_ends",
        "_jobs",
        "_kind",
        "_number",
        "_rng",
        "_service",
        "_sim",
        "_since",
        "_virtual",
    )

    def __init__(
        self, sim: Simulator, done: Done, service: Callable[[Job, Random], float], rng: Random, kind: str = "serve"
    ) -> None:
        self._sim, self._done, self._service, self._rng, self._kind = sim, done, service, rng, kind
        self._virtual = 0.0  # seconds that one job has had since the start
        self._since = 0.0
        self._busy = 0.0
        self._jobs: dict[Job, int] = {}
        self._ends: list[tuple[float, int, Job]] = []  # in virtual time; those taken back are skipped
        self._number = 0
        self._due = -1.0  # of the one event that counts

    @property
    def in_flight(self) -> int:
        return len(self._jobs)

    def submit(self, job: Job) -> None:
        self._pass()
        if not self._jobs:  # small numbers are more exact
            self._virtual = 0.0
            self._ends.clear()
        self._number += 1
        self._jobs[job] = self._number
        heappush(self._ends, (self._virtual + self._service(job, self._rng), self._number, job))
        self._ask()

    def _pass(self) -> None:
        """Time has passed."""
        now = self._sim.now
        if self._jobs:
            self._busy += now - self._since
            self._virtual += (now - self._since) / len(self._jobs)
        self._since = now

    def _ask(self) -> None:
        """For the next end, as it is now; what was asked for before counts no more."""
        ends, jobs = self._ends, self._jobs
        while ends and jobs.get(ends[0][2]) != ends[0][1]:
            heappop(ends)
        if ends:
            now = self._sim.now
            self._due = now + max(ends[0][0] - self._virtual, 0.0) * len(jobs)
            self._sim.at(self._due, self._end, self._number)
        else:
            self._due = -1.0

    def _end(self, asked: int) -> None:
        if self._sim.now != self._due or not self._ends:
            return
        self._pass()
        end, _, job = heappop(self._ends)
        self._virtual = max(self._virtual, end)  # up to rounding it is that already
        del self._jobs[job]
        self._ask()
        job.first = self._sim.now
        self._done(job)

    def abort(self, job: Job) -> None:
        if job in self._jobs:
            self._pass()
            del self._jobs[job]
            self._ask()

    def kill(self) -> list[Job]:
        self._pass()
        lost = list(self._jobs)
        self._jobs.clear()
        self._ends.clear()
        self._due = -1.0
        return lost

    def busy_seconds(self) -> dict[str, float]:
        self._pass()
        return {self._kind: self._busy}
