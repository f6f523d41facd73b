"""The replicas of a stage: they start, die, come back, and leave."""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from vllm_omni_sched.sim.kernel import Simulator
from vllm_omni_sched.sim.pools.choose import index_of
from vllm_omni_sched.sim.pools.load import Load
from vllm_omni_sched.sim.pools.replica import Replica
from vllm_omni_sched.sim.pools.spec import StageSpec
from vllm_omni_sched.sim.pools.trip import Leg, Trip
from vllm_omni_sched.sim.server import Done, Job, Server

Make = Callable[[int, Done], Server]
"""A new server for the replica of that index, which calls what it is given when a job is done."""


class Above(Protocol):
    """What a pool tells the pipeline."""

    def began(self, leg: Leg) -> None:
        """A request was given to a replica."""

    def finished(self, trip: Trip, leg: Leg) -> None:
        """A stage is done with a request; ``leg``: whose output it has, its own or that of identical work."""

    def fails(self, trip: Trip) -> None:
        """There is nobody to work on a request, and will not be."""

    def comes(self, stage: int) -> bool:
        """Whether a replica of a stage is there, or will be."""

    def joined(self, stage: int, index: int) -> None:
        """A new replica can take requests."""

    def leaves(self, stage: int, index: int) -> None:
        """A replica was stopped, empty."""


class Replicas(ABC):
    """The replicas of a stage, by index; what their servers are done with is for a subclass to pass on.

    1. A replica that died holds its devices, and is sent requests until that is noticed.
    2. A replica that drains gets no request, and leaves when it is empty.

    ``deaths``, ``added``, ``gone``: replicas so far. ``serving_seconds``: of replicas that could work, together;
    ``empty_seconds``: without any that could.
    """

    def __init__(self, sim: Simulator, stage: int, spec: StageSpec, make: Make) -> None:
        self.sim, self.stage, self.spec = sim, stage, spec
        self.above: Above
        self.live: list[Replica] = []  # that may get requests, by index
        self.replicas: dict[int, Replica] = {}
        self._make = make
        self._next_index = 0
        self._starting = 0
        self._past: Counter[str] = Counter()  # busy seconds of servers that are gone
        self.deaths = self.added = self.gone = 0
        self.serving_seconds = self.empty_seconds = 0.0
        self._held_seconds, self._held_since = 0.0, sim.now
        for _ in range(spec.replicas):
            self._serve(self._new())

    def new_load(self) -> Load | None:
        """To follow the work of a replica with; None: nobody needs that."""
        return None

    @abstractmethod
    def _done(self, job: Job) -> None:
        """A server is done with a job."""

    def _ended(self, leg: Leg, replica: Replica) -> None:
        leg.trip.leg = None
        replica.in_flight -= 1
        replica.pending_seconds -= leg.cost_seconds

    @property
    def held(self) -> int:
        """Replicas that hold their devices: with those that start, are dead, or drain."""
        return len(self.replicas) + self._starting

    @property
    def target(self) -> int:
        """Replicas that are there or come, without those that are to leave."""
        return self.held - sum(one.draining for one in self.replicas.values())

    @property
    def serving(self) -> int:
        """Replicas that can work now."""
        return sum(one.server is not None for one in self.replicas.values())

    @property
    def starting(self) -> int:
        """Replicas that were added, and are not there yet."""
        return self._starting

    @property
    def present(self) -> int:
        """Requests in this stage."""
        return sum(one.in_flight for one in self.replicas.values())

    def replica_seconds(self) -> float:
        """That replicas were held so far, together; times ``spec.devices`` these are device seconds."""
        self._count_held()
        return self._held_seconds

    def busy_seconds(self) -> dict[str, float]:
        """Device seconds so far by what they went to, of all replicas there were."""
        total: dict[str, float] = dict(self._past)
        for replica in self.replicas.values():
            if replica.server is not None:
                for work, seconds in replica.server.busy_seconds().items():
                    total[work] = total.get(work, 0.0) + seconds
        return total

    def kill(self, index: int) -> bool:
        """A replica dies, which nobody notices yet; whether it was alive."""
        replica = self.replicas.get(index)
        if replica is None or replica.server is None:
            return False
        self._count_held()
        self.deaths += 1
        lost = replica.server.kill()
        self._past.update(replica.server.busy_seconds())
        replica.server = None
        replica.limbo = [job for job in lost if isinstance(job, Leg)]
        return True

    def notice(self, index: int) -> list[Trip]:
        """The death of a replica is noticed: who is lost with it, in the order in which they came."""
        replica = self.replicas.get(index)
        if replica is None:
            return []  # it drained, and what it had was taken back
        self._stop_sending(replica)
        lost, replica.limbo = replica.limbo, []
        for leg in lost:
            self._ended(leg, replica)
        if replica.load is not None:
            replica.load = self.new_load()
        replica.draining = False  # to die before it has left is to die as others do
        return [leg.trip for leg in lost]

    def restart(self, index: int) -> None:
        """A dead replica is there again."""
        replica = self.replicas.get(index)
        if replica is not None and replica.server is None:
            self._serve(replica)

    def add(self) -> None:
        """Start one more replica; it is there after ``startup_seconds``."""
        self._count_held()
        self.added += 1
        self._starting += 1
        self.sim.after(self.spec.startup_seconds, self._started)

    def _started(self, _: None) -> None:
        self._count_held()
        self._starting -= 1
        replica = self._new()
        self._serve(replica)
        self.above.joined(self.stage, replica.index)

    def drain(self) -> int | None:
        """The idlest replica, of several the newest, gets no more requests, and leaves when it is empty; which one.

        None where there is only one left.
        """
        alive = [one for one in self.live if one.server is not None]
        if len(alive) < 2:
            return None
        chosen = min(reversed(alive), key=lambda one: one.in_flight)
        chosen.draining = True
        self._stop_sending(chosen)
        return chosen.index

    def drained(self, index: int) -> None:
        """To be called after `drain`, when everybody has been told."""
        self._leave_if_empty(self.replicas[index])

    def _leave_if_empty(self, replica: Replica) -> None:
        if replica.in_flight or replica.index not in self.replicas:
            return
        self._count_held()
        self.gone += 1
        del self.replicas[replica.index]
        if replica.server is not None:
            self._past.update(replica.server.busy_seconds())
        self.above.leaves(self.stage, replica.index)

    def _new(self) -> Replica:
        self._count_held()
        replica = Replica(self._next_index, None, self.new_load())
        self._next_index += 1
        self.replicas[replica.index] = replica
        return replica

    def _serve(self, replica: Replica) -> None:
        self._count_held()
        replica.server = self._make(replica.index, self._done)
        at = bisect_left(self.live, replica.index, key=index_of)
        if at == len(self.live) or self.live[at] is not replica:
            self.live.insert(at, replica)

    def _stop_sending(self, replica: Replica) -> None:
        if replica in self.live:
            self.live.remove(replica)

    def _count_held(self) -> None:
        now = self.sim.now
        passed = now - self._held_since
        if not passed:
            return
        serving = self.serving
        self._held_seconds += self.held * passed
        self.serving_seconds += serving * passed
        self.empty_seconds += 0.0 if serving else passed
        self._held_since = now
