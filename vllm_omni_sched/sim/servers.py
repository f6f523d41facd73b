"""Simulate replicas other than LLM engines: plain servers, a shared one, encoders on devices of their own."""

import math
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from random import Random  # noqa: TID251 (the type of an argument)

from vllm_omni_sched.sim.costs.base import EngineCosts
from vllm_omni_sched.sim.kernel import Simulator
from vllm_omni_sched.sim.work import Done, Item, Job

Service = Callable[[Job, Random], float]
"""Function that returns the seconds of a job at a place; called when it begins."""


class QueueServer:
    """Places with one job at a time each: a vocoder, a diffusion transformer, M/M/c, M/D/1.

    1. A job begins when a place is free, first come first served.
    2. It takes the seconds that ``service`` returns, whatever else runs.
    3. Its first output is its last one.

    Args:
        places: jobs at once; ``service``: seconds of each, 0 or more.
        kind: kind of its busy seconds.
    """

    def __init__(
        self, sim: Simulator, done: Done, places: int, service: Service, rng: Random, kind: str = "serve"
    ) -> None:
        self._sim, self._done, self._service, self._rng, self._kind = sim, done, service, rng, kind
        self._free = places
        self._waiting: deque[Job] = deque()
        self._ends: dict[Job, float] = {}  # end of each running job
        self._busy = 0.0  # including all of the running jobs
        self.in_flight = 0

    def submit(self, job: Job) -> None:
        self.in_flight += 1
        if self._free:
            self._begin(job)
        else:
            self._waiting.append(job)

    def _begin(self, job: Job) -> None:
        self._free -= 1
        seconds = self._service(job, self._rng)
        self._busy += seconds
        self._ends[job] = ends = self._sim.now + seconds
        self._sim.at(ends, self._end, job)

    def _end(self, job: Job) -> None:
        now = self._sim.now
        if self._ends.get(job) != now:  # it was withdrawn
            return
        del self._ends[job]
        self._leave()
        job.first = now
        self._done(job)

    def _leave(self) -> None:
        """Free a place, and begin the next job."""
        self.in_flight -= 1
        self._free += 1
        if self._waiting:
            self._begin(self._waiting.popleft())

    def abort(self, job: Job) -> None:
        ends = self._ends.pop(job, None)
        if ends is not None:
            self._busy -= ends - self._sim.now
            self._leave()
        elif job in self._waiting:
            self._waiting.remove(job)
            self.in_flight -= 1

    def kill(self) -> list[Job]:
        lost = [*self._ends, *self._waiting]
        self._busy = self.busy_seconds()[self._kind]
        self._ends.clear()
        self._waiting.clear()
        self.in_flight = 0
        return lost

    def busy_seconds(self) -> dict[str, float]:
        now = self._sim.now
        return {self._kind: self._busy - sum(ends - now for ends in self._ends.values())}


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


class EncoderServer:
    """Encodes items in batches, apart from the LLM: the encode instance of EPD disaggregation.

    (Singh et al., "Efficiently Serving Large Multimodal Models Using EPD Disaggregation", ICML 2025.)

    1. Items wait in the order in which their requests arrived, first come first served.
    2. A batch is the first waiting items of one modality, at most ``batch_items``; one batch at a time.
    3. A request is done with its last item; one without items is done at once.
    """

    def __init__(self, sim: Simulator, done: Done, costs: EngineCosts, batch_items: int = 8) -> None:
        self._sim, self._done, self._costs, self._most = sim, done, costs, batch_items
        self._waiting: deque[tuple[Job, Item]] = deque()
        self._left: dict[Job, int] = {}  # items of each job that are not encoded yet
        self._batch: list[Job] = []
        self._began = 0.0
        self._ends = -1.0  # of the running batch
        self._busy = 0.0

    @property
    def in_flight(self) -> int:
        return len(self._left)

    def submit(self, job: Job) -> None:
        items = job.request.items
        self._left[job] = len(items)
        if not items:
            self._sim.after(0.0, self._finish, job)
            return
        self._waiting.extend((job, item) for item in items)
        self._next()

    def _finish(self, job: Job) -> None:
        if self._left.get(job) != 0:  # it was withdrawn
            return
        del self._left[job]
        job.first = self._sim.now
        self._done(job)

    def _next(self) -> None:
        if self._ends >= 0 or not self._waiting:
            return
        waiting, batch = self._waiting, self._batch
        modality, embeds = waiting[0][1].modality, 0
        while waiting and len(batch) < self._most and waiting[0][1].modality == modality:
            job, item = waiting.popleft()
            batch.append(job)
            embeds += item.embeds
        self._began = self._sim.now
        self._ends = self._began + self._costs.encode_seconds(modality, embeds, len(batch))
        self._sim.at(self._ends, self._end)

    def _end(self, _: None) -> None:
        if self._sim.now != self._ends:
            return
        batch, self._batch = self._batch, []
        self._busy += self._ends - self._began
        self._ends = -1.0
        for job in batch:
            if job in self._left:  # otherwise it was withdrawn while it was encoded
                self._left[job] -= 1
        self._next()
        for job in dict.fromkeys(batch):
            self._finish(job)

    def abort(self, job: Job) -> None:
        """Forget a job; its items in the running batch are still encoded, since a batch cannot be split."""
        if self._left.pop(job, None) is not None:
            self._waiting = deque(one for one in self._waiting if one[0] is not job)

    def kill(self) -> list[Job]:
        self._busy, self._ends = self.busy_seconds()["encode"], -1.0
        lost = list(self._left)
        self._left.clear()
        self._waiting.clear()
        self._batch.clear()
        return lost

    def busy_seconds(self) -> dict[str, float]:
        return {"encode": self._busy + (self._sim.now - self._began if self._ends >= 0 else 0.0)}
