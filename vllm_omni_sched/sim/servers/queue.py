"""Simulate a plain server with places and a first come first served queue."""

from collections import deque
from collections.abc import Callable
from random import Random  # noqa: TID251 (the type of an argument)

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.kernel import Simulator
from vllm_omni_sched.sim.server import Done, Job

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

    Raises:
        ConfigError: ``places`` is below 1.
    """

    __slots__ = ("_busy", "_done", "_ends", "_free", "_kind", "_rng", "_service", "_sim", "_waiting", "in_flight")

    def __init__(
        self, sim: Simulator, done: Done, places: int, service: Service, rng: Random, kind: str = "serve"
    ) -> None:
        if places < 1:
            raise ConfigError(f"places must be 1 or more, got {places}")
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
