"""Move placed stages between the devices that they share, as the plan of `StagePlacement` says."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from vllm_omni_sched.config.stage_options.graph import PartitionOptions
from vllm_omni_sched.core.pipeline.placement import PlacedStage, StageMove, StagePlacement
from vllm_omni_sched.graph.partition import Plan
from vllm_omni_sched.sim.device import StageDevices
from vllm_omni_sched.sim.pools.pipeline import Pipeline

TICK_SECONDS = 1.0  # between two looks at a move


@dataclass(slots=True)
class MoveRecord:
    """A move that was begun: when, why, and how it ended; words of `PartitionReason` and `MigrationOutcome`.

    ``outcome``: ``moved``; ``stayed``: the old replica was not empty in time, or the new one has died; ``died``: the
    old one has; empty while the move goes on.
    """

    seconds: float
    stage: str
    source: str
    target: str
    reason: str
    outcome: str = ""
    ended_seconds: float | None = None


class StageMover:
    """Tells `StagePlacement` what stages need and where they are, and carries out its moves.

    1. A new replica starts on the other device, which takes ``startup_seconds`` of the stage. Then the old one gets no
       new requests, and ends when it is empty.
    2. If it is not empty within ``drain_seconds``, or the new one has died by then, it stays, and the new one ends.
    3. If the old one dies first, the move has failed, and recovery repairs it. The stage has two replicas then, and is
       no longer placed.

    In vLLM-Omni the old replica also waits until requests that it had have left the pipeline.

    Args:
        nbytes: memory that the replica of each placed stage holds, 0 if only a profile says so.

    ``moves``: all moves so far. ``plans``: how often a plan had which reason.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        options: PartitionOptions,
        devices: StageDevices,
        nbytes: Mapping[int, int],
        drain_seconds: float,
    ) -> None:
        self._pipeline, self._devices, self._nbytes, self._drain_seconds = pipeline, devices, nbytes, drain_seconds
        self._placement = StagePlacement(options, {pool.stage: pool.spec.name for pool in pipeline.pools})
        self._reason = ""
        self._move: tuple[StageMove, int, MoveRecord] | None = None  # with the index of the old replica
        self._drains_until: float | None = None  # None while the new replica starts
        self.moves: list[MoveRecord] = []
        self.plans: Counter[str] = Counter()
        pipeline.sim.after(TICK_SECONDS, self._tick)

    def _tick(self, _: None) -> None:
        pipeline = self._pipeline
        if not pipeline.active():
            return
        if self._drains_until is not None:
            self._look()
        self.check()
        pipeline.sim.after(TICK_SECONDS, self._tick)

    def check(self) -> Plan | None:
        """Plan if it is due, begin the next move, and return the new plan; None if nothing was planned."""
        now = self._pipeline.sim.now
        if not self._placement.is_due(now, self._move is not None):
            return None
        decision = self._placement.check(*self._facts(), now)
        if decision.plan is not None:
            self._reason = decision.plan.reason.value
            self.plans[self._reason] += 1
        if decision.move is not None:
            self._begin(decision.move)
        return decision.plan

    def _facts(self) -> tuple[list[PlacedStage], Counter[str]]:
        """Return the stages that may be placed, and the bytes that all others hold by device."""
        placed: list[PlacedStage] = []
        fixed: Counter[str] = Counter()
        for stage, nbytes in self._nbytes.items():
            pool = self._pipeline.pools[stage]
            on = [self._devices.device_of[stage, index] for index in pool.replicas]
            if pool.held == 1 and pool.live:
                placed.append(PlacedStage(stage, on[0], nbytes, pool.request_seconds))
            else:
                for place in on:
                    held = place.split(",")
                    fixed.update(dict.fromkeys(held, -(-nbytes // len(held))))
        return placed, fixed

    def _begin(self, move: StageMove) -> None:
        pool = self._pipeline.pools[move.stage_id]
        (old,) = pool.replicas
        record = MoveRecord(self._pipeline.sim.now, pool.spec.name, move.source, move.target, self._reason)
        self.moves.append(record)
        self._move = move, old, record
        self._devices.starts_on[move.stage_id] = move.target
        pool.add()
        self._pipeline.sim.after(pool.spec.startup_seconds, self._started)

    def _started(self, _: None) -> None:
        """Drain the old replica, since the new one has started."""
        assert self._move is not None
        move, old, _record = self._move
        if self._drain(move.stage_id, old):
            self._drains_until = self._pipeline.sim.now + self._drain_seconds
        else:
            self._end("died")

    def _drain(self, stage: int, index: int) -> bool:
        pool = self._pipeline.pools[stage]
        if pool.drain(index) is None:
            return False
        pool.drained(index)
        return True

    def _look(self) -> None:
        """Check whether the replica that drains is gone, dead or overdue."""
        assert self._move is not None
        move, old, record = self._move
        pool, now = self._pipeline.pools[move.stage_id], self._pipeline.sim.now
        others = [one for one in pool.replicas.values() if one.index != old]
        if record.outcome:  # the old one stays, and the new one drains
            if not any(one.draining for one in others):
                self._end(record.outcome)
            return
        replica = pool.replicas.get(old)
        if replica is None:
            self._end("moved")
        elif not replica.draining:
            self._end("died")
        elif replica.server is not None and (
            now >= (self._drains_until or 0.0) or not any(one.server is not None for one in others)
        ):
            record.outcome = "stayed"
            pool.keep(old)
            if not any(self._drain(move.stage_id, one.index) for one in others):
                self._end("stayed")

    def _end(self, outcome: str) -> None:
        assert self._move is not None
        record = self._move[2]
        record.outcome, record.ended_seconds = outcome, self._pipeline.sim.now
        self._placement.ended(outcome == "moved")
        self._move = self._drains_until = None
