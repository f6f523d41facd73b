"""Decide which stages of a request start next, on any graph of stages."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from vllm_omni_sched.graph.stages import StageGraph


@dataclass(frozen=True)
class FlowPlan:
    """The stages that a request needs, with the edges between them. Make one with `of` or `along`.

    ``stages``: in topological order. ``sources``: the needed stages that each stage reads, in its own order.
    ``outputs``: the stages whose outputs the request asked for. ``chunked``: the stages that read the outputs of their
    sources in chunks, while the sources run.
    """

    stages: tuple[int, ...]
    sources: Mapping[int, tuple[int, ...]]
    outputs: tuple[int, ...]
    chunked: frozenset[int] = frozenset()

    @classmethod
    def of(cls, graph: StageGraph, outputs: Iterable[int]) -> FlowPlan:
        """Return the plan of a request that asks for the outputs of these stages.

        Raises:
            ValueError: no output is asked for, or there is no such stage.
        """
        wanted = tuple(dict.fromkeys(outputs))
        if not wanted:
            raise ValueError("a request must ask for the output of a stage")
        needed = set(wanted)
        for stage_id in reversed(graph.order):
            if stage_id in needed:
                needed.update(graph.stage(stage_id).sources)
        unknown = [one for one in wanted if one not in graph.order]
        if unknown:
            raise ValueError(f"no stage {unknown[0]}; there are {list(graph.order)}")
        stages = tuple(one for one in graph.order if one in needed)
        chunked = frozenset(one for one in stages if graph.stage(one).reads_chunks)
        return cls(stages, {one: graph.stage(one).sources for one in stages}, wanted, chunked)

    @classmethod
    def along(cls, path: tuple[int, ...]) -> FlowPlan:
        """Return the plan of a request that goes from stage to stage and wants the output of the last one."""
        sources = {path[0]: ()} | {after: (before,) for before, after in pairwise(path)}
        return cls(path, sources, path[-1:])

    @cached_property
    def successors(self) -> Mapping[int, tuple[int, ...]]:
        """Return the needed stages that read each stage."""
        return {one: tuple(after for after in self.stages if one in self.sources[after]) for one in self.stages}

    @cached_property
    def chunk_groups(self) -> Mapping[int, tuple[int, ...]]:
        """Return, for each stage that sends or reads chunks, all stages that exchange chunks with it, by any way."""
        groups: dict[int, set[int]] = {}
        for stage_id in self.stages:
            if stage_id in self.chunked:
                joined = {stage_id}.union(*(groups.get(source, {source}) for source in self.sources[stage_id]))
                groups.update(dict.fromkeys(joined, joined))
        return {one: tuple(each for each in self.stages if each in group) for one, group in groups.items()}

    def sends_chunks(self, stage_id: int) -> tuple[int, ...]:
        """Return the needed stages that read the output of this one in chunks."""
        return tuple(after for after in self.successors[stage_id] if after in self.chunked)


class StagePhase(str, Enum):
    """Phase of one stage of a request."""

    WAITS = "waits"  # for outputs of its sources
    STARTED = "started"  # all inputs are there: it is in the stage's queue or on a replica
    DONE = "done"
    DROPPED = "dropped"  # it failed, or nothing needs it any more


class Again(NamedTuple):
    """Stages that have to run again, in topological order, and those of them that start now."""

    stages: tuple[int, ...]
    starts: tuple[int, ...]


class Dropped(NamedTuple):
    """What does not come after a failure: outputs that the request asked for, and all stages that do not run."""

    outputs: tuple[int, ...]
    stages: tuple[int, ...]


class RequestFlow:
    """The progress of one request through the stages of its plan.

    1. Only the stages of the plan run: those whose outputs were asked for, and all that these read.
    2. The request begins in the stages of the plan that read no other stage.
    3. A stage starts when the outputs of all its sources are there, and only then (join). So it starts once, unless
       rule 5 lets it run again. A stage that reads chunks starts when all its sources have started.
    4. A run of a stage is for the successors that lack its output when it is sent to a replica (`send`), and for those
       that read its chunks; the output goes to all of them (fork). Successors that have the output already are not
       disturbed.
    5. A stage whose inputs are lost waits for them (`again`). Its sources run again where they are done, for that
       stage only, and in turn without their own inputs if these are gone once a stage has run (``consumes``). A source
       that is running for other successors runs once more afterwards (`lacks`). Stages that exchange chunks run again
       together (`restart`), since each chunk is received once.
    6. A stage that fails takes along the stages that wait for its output or are reading its chunks, and those that lead
       to no output any more (`failed`). An output that was complete before counts.
    7. The request is over when each output that it asked for is complete or dropped.

    Args:
        consumes: whether the inputs of a stage are gone once it has run; otherwise outputs are held until the request
            leaves.
    """

    __slots__ = ("_chunks_sent", "_consumes", "_held", "_phases", "_sent_for", "complete", "dropped", "plan")

    def __init__(self, plan: FlowPlan, consumes: bool = True) -> None:
        self.plan = plan
        self.complete: set[int] = set()  # outputs that were asked for
        self.dropped: set[int] = set()
        self._consumes = consumes
        self._phases = dict.fromkeys(plan.stages, StagePhase.WAITS)
        self._held: set[tuple[int, int]] = set()  # edges whose output is there
        self._sent_for: dict[int, tuple[int, ...]] = {}
        self._chunks_sent: set[tuple[int, int]] = set()  # edges on which chunks are, or were, sent

    @property
    def is_over(self) -> bool:
        """Return whether no further output is to come."""
        return len(self.complete) + len(self.dropped) == len(self.plan.outputs)

    def phase(self, stage_id: int) -> StagePhase | None:
        """Return the phase of a stage; None if the request does not need it."""
        return self._phases.get(stage_id)

    def begin(self) -> tuple[int, ...]:
        """Return the stages in which the request begins."""
        return self._start_ready(self.plan.stages)

    def send(self, stage_id: int) -> tuple[int, ...]:
        """Record that a stage is sent to a replica, and return the successors that its output is for."""
        reading = [
            one
            for one in self.plan.sends_chunks(stage_id)
            if self._phases[one] is not StagePhase.DROPPED and (stage_id, one) not in self._chunks_sent
        ]
        self._chunks_sent.update((stage_id, one) for one in reading)
        lacking = [one for one in self.lacks(stage_id) if one not in reading]
        self._sent_for[stage_id] = found = (*lacking, *reading)
        return found

    def sent_for(self, stage_id: int) -> tuple[int, ...]:
        """Return the successors that the present run of a stage was sent for; nothing before it is sent."""
        return self._sent_for.get(stage_id, ())

    def lacks(self, stage_id: int) -> tuple[int, ...]:
        """Return the successors that wait and lack the output of this stage."""
        return tuple(
            after
            for after in self.plan.successors[stage_id]
            if self._phases[after] is StagePhase.WAITS and not self._has(stage_id, after)
        )

    def _has(self, source: int, stage_id: int) -> bool:
        """Return whether the output of a source is there for a stage, or was sent to it in chunks."""
        return (source, stage_id) in self._held or (source, stage_id) in self._chunks_sent

    def finished(self, stage_id: int) -> tuple[int, ...]:
        """Record that a stage is done, and return the stages that start now; nothing for one that was not started."""
        if self._phases.get(stage_id) is not StagePhase.STARTED:
            return ()
        self._phases[stage_id] = StagePhase.DONE
        if stage_id in self.plan.outputs and stage_id not in self.dropped:
            self.complete.add(stage_id)
        if stage_id not in self._sent_for:  # the request got the output of another one's run
            self.send(stage_id)
        lacking = self.lacks(stage_id)
        sent_for = self._sent_for.pop(stage_id)
        self._held.update((stage_id, after) for after in lacking if after in sent_for)
        return self._start_ready(self.plan.successors[stage_id])

    def restart(self, stage_id: int) -> tuple[int, ...]:
        """Let a stage and all that exchange chunks with it run again, and return those that do; dropped ones do not."""
        group = self.plan.chunk_groups.get(stage_id, (stage_id,))
        found = tuple(one for one in group if self._phases[one] not in (StagePhase.WAITS, StagePhase.DROPPED))
        for one in found:
            self._phases[one] = StagePhase.STARTED
            self._sent_for.pop(one, None)
        self._chunks_sent = {edge for edge in self._chunks_sent if edge[0] not in found}
        return found

    def again(self, stage_id: int, lost: Collection[int] = ()) -> Again:
        """Let a stage run again.

        Args:
            lost: the sources whose outputs are no longer there for it.
        """
        affected: set[int] = set()
        if self.lose(stage_id, lost):
            self._make_inputs(stage_id, affected)
        stages = tuple(one for one in self.plan.stages if one in affected)
        return Again(stages, self._start_ready(stages))

    def lose(self, stage_id: int, lost: Collection[int] = ()) -> bool:
        """Let a stage wait for the outputs of these sources; return whether it runs at all.

        Until `again`, the sources do not run for it.
        """
        if self._phases.get(stage_id, StagePhase.DROPPED) is StagePhase.DROPPED:
            return False
        self._wait(stage_id, lost)
        return True

    def _wait(self, stage_id: int, lost: Collection[int]) -> None:
        self._phases[stage_id] = StagePhase.WAITS
        self._sent_for.pop(stage_id, None)
        self._held.difference_update((source, stage_id) for source in lost)
        self._chunks_sent = {edge for edge in self._chunks_sent if edge[1] != stage_id}  # each is received once

    def _make_inputs(self, stage_id: int, affected: set[int]) -> None:
        affected.add(stage_id)
        for source in self.plan.sources[stage_id]:
            if not self._has(source, stage_id) and self._phases[source] in _ENDED:
                self._wait(source, self.plan.sources[source] if self._consumes else ())
                self._make_inputs(source, affected)

    def failed(self, stage_id: int) -> Dropped:
        """Record that a stage has failed, and return what does not come because of it."""
        if stage_id not in self._phases:
            return Dropped((), ())
        gone: set[int] = set()
        # of a stage that was done, the output may be lost
        pending = [stage_id] if self._phases[stage_id] in _PENDING else self._need(stage_id)
        while pending:
            one = pending.pop()
            if one not in gone:
                gone.add(one)
                pending += self._need(one)
        outputs = tuple(one for one in self.plan.outputs if one in gone - self.complete - self.dropped)
        self.dropped.update(outputs)
        self._drop(gone)
        useful = set(self.plan.outputs) - self.complete - self.dropped
        for one in reversed(self.plan.stages):
            if one in useful:
                useful.update(self.plan.sources[one])
        idle = {one for one, phase in self._phases.items() if phase in _PENDING and one not in useful}
        self._drop(idle)
        return Dropped(outputs, tuple(one for one in self.plan.stages if one in gone | idle))

    def _need(self, stage_id: int) -> list[int]:
        """Return the successors that cannot end without the output of this stage."""
        reading = (one for one in self.plan.sends_chunks(stage_id) if self._phases[one] in _PENDING)
        return [*self.lacks(stage_id), *reading]

    def _drop(self, stages: Iterable[int]) -> None:
        for one in stages:
            self._phases[one] = StagePhase.DROPPED

    def _start_ready(self, stages: Iterable[int]) -> tuple[int, ...]:
        starts = set[int]()
        pending = list(stages)
        for one in pending:
            waits = self._phases[one] is StagePhase.WAITS
            if waits and all(self._comes(source, one) for source in self.plan.sources[one]):
                self._phases[one] = StagePhase.STARTED
                starts.add(one)
                pending += self.plan.sends_chunks(one)
        return tuple(one for one in self.plan.stages if one in starts)

    def _comes(self, source: int, stage_id: int) -> bool:
        """Return whether the output of a source is there, or comes while the stage runs."""
        if self._has(source, stage_id):
            return True
        runs = self._phases[source] is StagePhase.STARTED and source not in self._sent_for
        return stage_id in self.plan.chunked and runs

    def validate(self) -> None:
        """Check the laws of a flow; O(n), for tests.

        Raises:
            AssertionError: one is broken.
        """
        plan = self.plan
        for one, phase in self._phases.items():
            inputs = [self._comes(source, one) for source in plan.sources[one]]
            if phase is StagePhase.STARTED or (phase is StagePhase.DONE and one not in plan.chunked):
                assert all(inputs), f"stage {one} is {phase.value} and lacks an input"
        assert self.complete.isdisjoint(self.dropped), f"outputs both complete and dropped: {self.complete}"
        assert self.complete | self.dropped <= set(plan.outputs), "outputs that nobody asked for"


_PENDING = (StagePhase.WAITS, StagePhase.STARTED)
_ENDED = (StagePhase.DONE, StagePhase.DROPPED)
