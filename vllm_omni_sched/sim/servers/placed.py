"""Simulate servers and encoders on a device that other stages share."""

import math
from random import Random  # noqa: TID251 (the type of an argument)

from vllm_omni_sched.sim.costs.base import EngineCosts
from vllm_omni_sched.sim.device import DeviceShare
from vllm_omni_sched.sim.kernel import Simulator
from vllm_omni_sched.sim.server import Done, Job
from vllm_omni_sched.sim.servers.encoder import EncoderServer
from vllm_omni_sched.sim.servers.queue import QueueServer, Service


class PlacedQueue(QueueServer):
    """A `QueueServer` with one place, whose job takes its time on a shared device."""

    __slots__ = ("_share",)

    def __init__(self, sim: Simulator, done: Done, service: Service, rng: Random, share: DeviceShare) -> None:
        super().__init__(sim, done, 1, lambda job, rng: service(job, rng) / share.speed, rng)
        self._share = share

    def _run(self, job: Job, seconds: float) -> None:
        self._ends[job] = math.inf  # not known: it depends on the other stages
        self._share.run(seconds, self._ended, job)

    def _ended(self, job: Job) -> None:
        self._ends[job] = self._sim.now
        self._end(job)

    def abort(self, job: Job) -> None:
        self._stop([job])
        super().abort(job)

    def kill(self) -> list[Job]:
        self._stop(list(self._ends))
        return super().kill()

    def _stop(self, jobs: list[Job]) -> None:
        for job in jobs:
            if job in self._ends:
                self._share.stop()
                self._ends[job] = self._sim.now

    def busy_seconds(self) -> dict[str, float]:
        return {self._kind: self._share.busy_seconds()}


class PlacedEncoder(EncoderServer):
    """An `EncoderServer` whose batches take their time on a shared device."""

    __slots__ = ("_share",)

    def __init__(self, sim: Simulator, done: Done, costs: EngineCosts, batch_items: int, share: DeviceShare) -> None:
        super().__init__(sim, done, costs, batch_items)
        self._share = share

    def _run(self, seconds: float) -> None:
        self._ends = math.inf  # not known: it depends on the other stages
        self._share.run(seconds / self._share.speed, self._ended, None)

    def _ended(self, nothing: None) -> None:
        self._ends = self._sim.now
        self._end(nothing)

    def kill(self) -> list[Job]:
        self._share.stop()
        return super().kill()

    def busy_seconds(self) -> dict[str, float]:
        return {"encode": self._share.busy_seconds()}
