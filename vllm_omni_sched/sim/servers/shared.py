"""A server that all its jobs share."""

import math
from collections.abc import Callable
from heapq import heappop, heappush
from random import Random  # noqa: TID251 (the type of an argument)

from vllm_omni_sched.sim.kernel import Simulator
from vllm_omni_sched.sim.server import Done, Job


class SharedServer:
    """Serves all jobs by egalitarian processor sharing: each of n jobs has 1/n of the server, all the time.

    Exact, by virtual time (Parekh and Gallager, "A Generalized Processor Sharing Approach to Flow Control", 1993): it
    runs at 1/n, a job that needs s seconds ends s after it came, and so the order of ends never changes. O(log n) for
    each job.

    Args:
        service: seconds of a job at a speed of 1, above 0; asked when it begins.
        speed: of each of n jobs, in place of 1/n.
        units: of the server that n jobs use, for its busy seconds.
        places: jobs that run at once; further ones wait, first come first served.
    """

    def __init__(
        self,
        sim: Simulator,
        done: Done,
        service: Callable[[Job, Random], float],
        rng: Random,
        kind: str = "serve",
        *,
        speed: Callable[[int], float] = lambda jobs: 1 / jobs,
        units: Callable[[int], float] = lambda jobs: 1.0,
        places: float = math.inf,
    ) -> None:
        self._speed, self._units, self._places = speed, units, places
        self._waiting: dict[Job, None] = {}  # in the order in which they came
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
        return len(self._jobs) + len(self._waiting)

    def submit(self, job: Job) -> None:
        if len(self._jobs) < self._places:
            self._begin(job)
        else:
            self._waiting[job] = None

    def _begin(self, job: Job) -> None:
        self._pass()
        if not self._jobs:  # small numbers are more exact
            self._virtual = 0.0
            self._ends.clear()
        self._number += 1
        self._jobs[job] = self._number
        heappush(self._ends, (self._virtual + self._service(job, self._rng), self._number, job))
        self._ask()

    def _pass(self) -> None:
        """Advance the virtual time by what each job has had since the last event."""
        now = self._sim.now
        if self._jobs:
            self._busy += (now - self._since) * self._units(len(self._jobs))
            self._virtual += (now - self._since) * self._speed(len(self._jobs))
        self._since = now

    def _ask(self) -> None:
        """Schedule the next end as it is now; an end that was scheduled before no longer counts."""
        ends, jobs = self._ends, self._jobs
        while ends and jobs.get(ends[0][2]) != ends[0][1]:
            heappop(ends)
        if ends:
            now = self._sim.now
            self._due = now + max(ends[0][0] - self._virtual, 0.0) / self._speed(len(jobs))
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
        self._leave()
        job.first = self._sim.now
        self._done(job)

    def _leave(self) -> None:
        """Begin the next waiting job in the free place, or schedule the next end."""
        if self._waiting:
            job = next(iter(self._waiting))
            del self._waiting[job]
            self._begin(job)
        else:
            self._ask()

    def abort(self, job: Job) -> None:
        if job in self._jobs:
            self._pass()
            del self._jobs[job]
            self._leave()
        else:
            self._waiting.pop(job, None)

    def kill(self) -> list[Job]:
        self._pass()
        lost = [*self._jobs, *self._waiting]
        self._jobs.clear()
        self._waiting.clear()
        self._ends.clear()
        self._due = -1.0
        return lost

    def busy_seconds(self) -> dict[str, float]:
        self._pass()
        return {self._kind: self._busy}
