"""Represent the stages of a pipeline as a graph that is checked once, when it is made."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from heapq import heapify, heappop, heappush

from vllm_omni_sched.config.errors import ConfigError


class GraphError(ConfigError):
    """The stages do not form a graph that a request can go through; the message names the stages."""


class StageKind(str, Enum):
    """Kind of work that runs in a stage."""

    AR = "ar"  # autoregressive: tokens, one step at a time
    GENERATION = "generation"  # one forward pass per chunk, like a vocoder
    DIFFUSION = "diffusion"


@dataclass(frozen=True)
class Stage:
    """One stage of a pipeline.

    ``sources``: the stages whose output it reads; empty for a stage that reads the request itself.
    ``final_output``: its output goes to the user; other stages may read it too.
    ``modality``: modality of its output. ``reads_chunks``: it reads the outputs of its sources while these run.

    Raises:
        GraphError: the id is negative, a source is named twice, or ``replicas`` is below 1.
    """

    stage_id: int
    name: str
    kind: StageKind
    sources: tuple[int, ...] = ()
    final_output: bool = False
    modality: str = "text"
    replicas: int = 1
    devices: tuple[str, ...] = ()
    reads_chunks: bool = False

    def __post_init__(self) -> None:
        if self.stage_id < 0:
            raise GraphError(f"stage {self}: stage_id must be 0 or more")
        if len(set(self.sources)) < len(self.sources):
            raise GraphError(f"stage {self}: sources names a stage twice: {list(self.sources)}")
        if self.replicas < 1:
            raise GraphError(f"stage {self}: replicas must be 1 or more, got {self.replicas}")

    def __str__(self) -> str:
        return f"{self.name} ({self.stage_id})"


@dataclass(frozen=True)
class StageGraph:
    """A directed acyclic graph of stages. Make one with `of`, which checks it.

    1. Ids are unique, every source exists, and no stage waits for its own output.
    2. A request enters at ``entries``; every stage gets its input from there, directly or indirectly.
    3. Every stage makes a final output, or feeds a stage that does, directly or indirectly.
    """

    stages: tuple[Stage, ...]
    entries: tuple[int, ...]

    @classmethod
    def of(cls, stages: Iterable[Stage], entries: Collection[int] | None = None) -> "StageGraph":
        """Return the graph of these stages after checking it.

        Args:
            entries: the stages that receive the request; default: all without a source.

        Raises:
            GraphError: a rule is broken, or an entry does not exist.
        """
        ordered = tuple(sorted(stages, key=lambda stage: stage.stage_id))
        if entries is None:
            entries = [stage.stage_id for stage in ordered if not stage.sources]
        graph = cls(ordered, tuple(sorted(set(entries))))
        graph._check()
        return graph

    @cached_property
    def _by_id(self) -> dict[int, Stage]:
        return {stage.stage_id: stage for stage in self.stages}

    @cached_property
    def _successors(self) -> dict[int, tuple[int, ...]]:
        found: dict[int, list[int]] = {stage.stage_id: [] for stage in self.stages}
        for stage in self.stages:
            for source in stage.sources:
                found[source].append(stage.stage_id)
        return {stage_id: tuple(after) for stage_id, after in found.items()}

    @cached_property
    def branches(self) -> bool:
        """Return whether the stages are more than a line, in which each reads the one with the next smaller id."""
        before = (stage.stage_id for stage in self.stages)
        return any(stage.sources != (one,) for one, stage in zip(before, self.stages[1:], strict=False))

    @cached_property
    def chunked(self) -> bool:
        """Return whether a stage reads the outputs of others in chunks."""
        return any(stage.reads_chunks for stage in self.stages)

    def exchanges_chunks(self, stage_id: int) -> bool:
        """Return whether a stage reads chunks, or another one reads its output in chunks.

        Raises:
            ValueError: there is no such stage.
        """
        return any(self.stage(one).reads_chunks for one in (stage_id, *self.successors(stage_id)))

    def with_chunks(self, stage_ids: Collection[int]) -> "StageGraph":
        """Return the graph in which these stages, and no others, read chunks."""
        stages = tuple(replace(one, reads_chunks=one.stage_id in stage_ids) for one in self.stages)
        return StageGraph(stages, self.entries)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Return all ids in topological order; of several that could be next, the smallest."""
        waits_for = {stage.stage_id: len(stage.sources) for stage in self.stages}
        ready = [stage_id for stage_id, count in waits_for.items() if not count]
        heapify(ready)
        found = []
        while ready:
            stage_id = heappop(ready)
            found.append(stage_id)
            for after in self._successors[stage_id]:
                waits_for[after] -= 1
                if not waits_for[after]:
                    heappush(ready, after)
        return tuple(found)

    def stage(self, stage_id: int) -> Stage:
        """Return the stage with that id.

        Raises:
            ValueError: there is no such stage.
        """
        if stage_id not in self._by_id:
            raise ValueError(f"no stage {stage_id}; there are {_names(self.stages)}")
        return self._by_id[stage_id]

    def successors(self, stage_id: int) -> tuple[int, ...]:
        """Return the ids of the stages that read the output of this one.

        Raises:
            ValueError: there is no such stage.
        """
        return self._successors[self.stage(stage_id).stage_id]

    def remaining(self, stage_id: int) -> tuple[int, ...]:
        """Return this stage and all stages that depend on its output, in topological order.

        Raises:
            ValueError: there is no such stage.
        """
        found = _reached([self.stage(stage_id).stage_id], self._successors)
        return tuple(one for one in self.order if one in found)

    def ancestors(self, stage_id: int) -> frozenset[int]:
        """Return the stages whose output this stage needs, directly or indirectly.

        Raises:
            ValueError: there is no such stage.
        """
        sources = {stage.stage_id: stage.sources for stage in self.stages}
        return frozenset(_reached(self.stage(stage_id).sources, sources))

    def longest_path_seconds(self, costs: Mapping[int, float], start: int) -> float:
        """Return the seconds of the costliest path from ``start``, inclusive, to any final stage.

        Args:
            costs: seconds by stage id; a missing stage costs nothing, as the request does not visit it.

        Raises:
            ValueError: there is no such stage.
        """
        longest: dict[int, float] = {}
        for one in reversed(self.remaining(start)):
            after = max((longest[successor] for successor in self._successors[one]), default=0.0)
            longest[one] = costs.get(one, 0.0) + after
        return longest[start]

    def _check(self) -> None:
        ids = [stage.stage_id for stage in self.stages]
        for stage, following in zip(self.stages, self.stages[1:], strict=False):
            if stage.stage_id == following.stage_id:
                raise GraphError(f"two stages have the id {stage.stage_id}: {stage.name} and {following.name}")
        for stage in self.stages:
            for source in stage.sources:
                if source not in self._by_id:
                    raise GraphError(f"stage {stage} reads stage {source}, which does not exist; known are {ids}")
        self._check_cycles()
        for entry in self.entries:
            if entry not in self._by_id:
                raise GraphError(f"entry {entry} is not a stage; known stages are {_names(self.stages)}")
        if not self.entries:
            raise GraphError("no entry: no stage reads the request itself; leave the sources of the first stage empty")
        finals = [stage.stage_id for stage in self.stages if stage.final_output]
        if not finals:
            raise GraphError(f"no final output: set final_output on one of the stages {_names(self.stages)}")
        fed = _reached(self.entries, self._successors)
        if lost := [stage for stage in self.stages if stage.stage_id not in fed]:
            at = _names(self._by_id[entry] for entry in self.entries)
            raise GraphError(f"unreachable from the entries {at}: {_names(lost)}; give them a source, or remove them")
        used = _reached(finals, {stage.stage_id: stage.sources for stage in self.stages})
        if idle := [stage for stage in self.stages if stage.stage_id not in used]:
            raise GraphError(f"no final output depends on {_names(idle)}; set final_output there, or remove them")

    def _check_cycles(self) -> None:
        try:
            TopologicalSorter({stage.stage_id: stage.sources for stage in self.stages}).prepare()
        except CycleError as error:
            # graphlib lists the cycle in the direction of the data, first and last the same
            cycle = " -> ".join(str(self._by_id[stage_id]) for stage_id in _from_smallest(error.args[1]))
            raise GraphError(f"stages wait for each other in a cycle: {cycle}") from None


def _from_smallest(cycle: list[int]) -> list[int]:
    at = cycle.index(min(cycle))
    turned = cycle[at:-1] + cycle[:at]
    return [*turned, turned[0]]


def _names(stages: Iterable[Stage]) -> str:
    return ", ".join(map(str, stages)) or "none"


def _reached(starts: Iterable[int], following: Mapping[int, Iterable[int]]) -> set[int]:
    found, todo = set(starts), list(starts)
    while todo:
        for one in following[todo.pop()]:
            if one not in found:
                found.add(one)
                todo.append(one)
    return found
