"""Pipelines of the core alone whose stages branch: random work, deaths, lost inputs and errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from random import Random
from typing import Any

from vllm_omni_sched.config.stage_options import StageSchedConfig
from vllm_omni_sched.core.pipeline import events as e
from vllm_omni_sched.core.pipeline.context import PipelineContext
from vllm_omni_sched.core.pipeline.core import PipelineCore
from vllm_omni_sched.core.pipeline.requests import PipelineRequest, StageWork
from vllm_omni_sched.graph.flow import FlowPlan, RequestFlow, StagePhase
from vllm_omni_sched.graph.stages import Stage, StageGraph, StageKind
from vllm_omni_sched.resource.pipeline.stage_cost import Features

DIAMOND: Mapping[int, tuple[int, ...]] = {0: (), 1: (0,), 2: (0,), 3: (1, 2)}
FORK: Mapping[int, tuple[int, ...]] = {0: (), 1: (0,), 2: (0,)}


def random_sources(rng: Random, most: int = 6) -> dict[int, tuple[int, ...]]:
    """Stages that each read some of the earlier ones, and are no line; the first one reads the request."""
    found = {
        stage: tuple(sorted(rng.sample(range(stage), rng.randint(1, min(stage, 3))))) if stage else ()
        for stage in range(rng.randint(2, most - 1))
    }
    return found | {len(found): (0,)}


def graph_of(
    sources: Mapping[int, tuple[int, ...]],
    finals: set[int],
    replicas: int = 1,
    chunked: Collection[int] = (),
) -> StageGraph:
    """Stages that nothing reads make a final output, too. ``chunked``: those that read chunks."""
    read = {one for each in sources.values() for one in each}
    kinds = [StageKind.AR, StageKind.GENERATION, StageKind.DIFFUSION]
    return StageGraph.of(
        Stage(
            at,
            f"stage{at}",
            kinds[at % 3],
            reads,
            at in finals or at not in read,
            replicas=replicas,
            reads_chunks=at in chunked,
        )
        for at, reads in sources.items()
    )


class Branching:
    """Drives the core of a graph of stages by hand.

    ``options``: as under ``omni_sched`` in the deploy YAML. ``consumes``: inputs are gone once a stage has run.
    ``chunked``: the stages that read chunks. ``payloads``: all others read payloads of connectors, which are sent to
    one run.
    """

    def __init__(
        self,
        sources: Mapping[int, tuple[int, ...]],
        finals: set[int] = frozenset(),  # type: ignore[assignment]
        replicas: int = 1,
        at_once: int = 2,
        consumes: bool = True,
        chunked: Collection[int] = (),
        payloads: bool = False,
        **options: Any,
    ) -> None:
        self.graph = graph_of(sources, finals, replicas, chunked)
        self.payloads = payloads
        self.finals = [stage.stage_id for stage in self.graph.stages if stage.final_output]
        self.consumes = consumes
        self.now = 0.0
        self.core = PipelineCore(PipelineContext(StageSchedConfig(**options), self.graph, Random(0)))
        for stage in self.graph.stages:
            self.core.add_stage(stage.stage_id, at_once, range(replicas))
        self.outputs: dict[str, Counter[int]] = {}  # what came, by request
        self.ended: dict[str, str] = {}
        self.starts: Counter[tuple[str, int]] = Counter()
        self.down: list[tuple[int, int]] = []  # replicas to be restarted
        self.keys: dict[str, str] = {}
        self.owners: dict[tuple[str, int], str] = {}  # in whose name the work ran, by request and stage
        self.sealed: Counter[str] = Counter()  # how often requests with a key could join those before no longer

    def tell(self, event: e.Event) -> list[e.Action]:
        """Pass an event to the core, and carry out its actions."""
        actions = self.core.handle(event, self.now)
        for action in actions:
            self._do(action)
        return actions

    def _do(self, action: e.Action) -> None:
        match action:
            case e.Start(work):
                work.sent = True
                self.starts[work.request_id, work.stage_id] += 1
                if work.known.flow is not None:
                    work.known.flow.send(work.stage_id)
            case e.Proceeds(name, _, starts):
                for stage_id in starts:
                    self.submit(name, stage_id)
            case e.Restart(stage_id, index):
                self.down.append((stage_id, index))
            case e.GivenUp(work, receivers):
                for name in receivers:
                    self.fail(name, work.stage_id)
            case e.Inherited(owner, heir) if self.consumes:
                flow = self.flow(owner)
                assert flow is not None
                read = flow.plan.sources[heir.stage_id]
                lost = [source for source in read if (source, heir.stage_id) not in flow._held]
                if lost:
                    self.recall(heir.request_id, heir.stage_id, *lost)
            case e.Stop(work):
                self.tell(e.Dropped(work.stage_id, work.request_id))
            case _:
                pass

    # ---- requests

    def come(self, name: str, outputs: list[int] | None = None, key: str | None = None) -> RequestFlow:
        """Let a request arrive; its work is that of other requests with the same key."""
        plan = FlowPlan.of(self.graph, outputs or self.finals)
        flow = RequestFlow(plan, self.consumes)
        known = PipelineRequest(name, self.now, self.core.context.classes.default, path=plan.stages, flow=flow)
        known.features.update(dict.fromkeys(plan.stages, Features(prompt_tokens=100)))
        self.outputs[name] = Counter()
        if key is not None:
            self.keys[name] = key
        self.tell(e.Arrived(known))
        return flow

    def submit(self, name: str, stage_id: int) -> None:
        known = self.core.context.known.get(name)
        if known is None:
            return
        key = self._key(name, stage_id) if name in self.keys else None
        work = StageWork(request_id=name, stage_id=stage_id, known=known, arrived=self.now, key=key)
        actions = self.tell(e.Submitted(work, known.features[stage_id]))
        if any(isinstance(one, e.Lead) for one in actions):
            self.tell(e.Waits(work))

    def _key(self, name: str, stage_id: int) -> object:
        """Return the key of a request's work in a stage, by the rules of `BranchSharing`."""
        flow, content = self.flow(name), self.keys[name]
        assert flow is not None
        if stage_id in flow.plan.chunked:
            sources = flow.plan.sources[stage_id]
            leaders = (self.core.stages[source].leader_of(name) for source in sources)
            ended = (self.owners.get((name, source)) for source in sources)
            return stage_id, tuple(owner or leader for owner, leader in zip(ended, leaders, strict=True))
        if stage_id in flow.plan.chunk_groups:
            return stage_id, content, flow.plan.outputs, self.sealed[content]
        if not self.payloads:
            return stage_id, content
        owners = tuple(self.owners[name, source] for source in flow.plan.sources[stage_id])
        return stage_id, owners or (content, flow.plan.outputs)

    def finish(self, name: str, stage_id: int) -> None:
        """End the work that was begun for a request."""
        self.now += 0.1
        flow_outputs = {}
        for action in self.core.handle(e.Finished(stage_id, name), self.now):
            if isinstance(action, e.Ended):
                flow_outputs = dict.fromkeys(action.receivers)
                self.owners.update({(receiver, stage_id): name for receiver in action.receivers})
                if self.graph.exchanges_chunks(stage_id):
                    self.sealed.update(self.keys[one] for one in action.receivers if one in self.keys)
                for receiver in flow_outputs:
                    if receiver in self.core.context.known:
                        self.outputs[receiver][stage_id] += 1
            self._do(action)
        for receiver in flow_outputs:
            flow = self.flow(receiver)
            if flow is not None and flow.is_over:
                self.leave(receiver, "done")
        self.tell(e.Tick())

    def flow(self, name: str) -> RequestFlow | None:
        known = self.core.context.known.get(name)
        return None if known is None else known.flow

    def fail(self, name: str, stage_id: int) -> None:
        """Report an error of a stage for a request."""
        if name in self.ended:
            return
        for action in self.tell(e.StageFailed(stage_id, name)):
            if isinstance(action, e.Fails):
                if action.over:
                    self.leave(name, "failed" if action.whole else "partly")
                    return
                for one in action.stages:
                    self._withdraw(name, one)
        self.tell(e.Tick())

    def error(self, name: str, stage_id: int) -> None:
        """Let the work that was begun for a request end with an error."""
        receivers = self.core.stages[stage_id].receivers(name)
        self.tell(e.Finished(stage_id, name, ok=False))
        for receiver in receivers:
            self.fail(receiver, stage_id)

    def _withdraw(self, name: str, stage_id: int) -> None:
        self.tell(e.Detached(stage_id, name))
        self.tell(e.Dropped(stage_id, name))

    def leave(self, name: str, how: str) -> None:
        assert name not in self.ended, f"{name} leaves twice: {self.ended[name]}, {how}"
        self.ended[name] = how
        for stage_id in self.core.stages:
            self._withdraw(name, stage_id)
        self.tell(e.Left(name))
        self.tell(e.Tick())

    # ---- replicas

    def kill(self, stage_id: int, index: int, lost: Any = lambda sources: ()) -> None:
        """Kill a replica; ``lost`` returns which inputs of an interrupted work are gone."""
        if not self.core.stages[stage_id].replicas[index].up:
            return
        self.tell(e.ReplicaDown(stage_id, index))
        for action in self.tell(e.ReplicaDied(stage_id, index, "killed")):
            if isinstance(action, e.Lost) and not action.waits:
                flow = action.work.known.flow
                assert flow is not None
                if stage_id in flow.plan.chunk_groups:
                    self._stop(action.work, flow)
                    continue
                gone = tuple(lost(flow.plan.sources[stage_id]))
                if gone:
                    self.tell(e.InputsLost(stage_id, action.work.request_id, gone))
        self.tell(e.DeathExamined(stage_id, index, "killed"))

    def _stop(self, lost: StageWork, flow: RequestFlow) -> None:
        """Withdraw a request from the stages that exchange chunks with one that has lost it."""
        name, stages, recovery = lost.request_id, self.core.stages, self.core.recovery
        assert recovery is not None
        group = [one for one in flow.plan.chunk_groups[lost.stage_id] if flow.phase(one) is not StagePhase.DROPPED]
        for stage_id in group:
            self.tell(e.TakenOut(stage_id, name))
        works = recovery.works_of(name)
        present = [stages[one].receivers(name) for one in group]
        everybody = max(present, key=len)
        if name in self.ended:  # its work goes on for others
            everybody = next((these for these in present if these[0] != name), everybody)
        for stage_id in group:
            if stage_id in works:
                self.tell(e.Regrouped(stage_id, name, everybody))
            if stage_id in works and works[stage_id] is not lost and stages[stage_id].running.get(name):
                self.tell(e.Withdrawn(stage_id, name))

    def recall(self, name: str, stage_id: int, *senders: int) -> None:
        """The replicas of sources have died before their outputs for this stage were sent."""
        stage = self.core.stages[stage_id]
        work = stage.running.get(name)
        if work is not None:
            self.tell(e.Withdrawn(stage_id, name))
        else:
            work = stage.waiting.get(name)
            if work is None:
                return
            self.tell(e.TakenOut(stage_id, name))
        self.tell(e.Recalled(work, stage_id, 0, senders))

    def revive(self) -> None:
        """Restart what is to be restarted."""
        while self.down:
            self.tell(e.ReplicaUp(*self.down.pop()))
        self.tell(e.Tick())

    def running(self) -> list[tuple[str, int]]:
        return [(name, at) for at, stage in self.core.stages.items() for name in stage.running]

    def finish_all(self) -> None:
        """Restart everything, and let everything end."""
        for _ in range(10_000):
            self.revive()
            self.now += 1.0
            self.tell(e.Tick())
            running = self.running()
            if not running and not self.down:
                return
            if running:
                name, stage_id = running[0]
                self.finish(name, stage_id)
        raise AssertionError(f"it does not come to rest: {self.running()}")

    def phases(self, name: str) -> dict[int, StagePhase | None]:
        flow = self.flow(name)
        assert flow is not None
        return {one: flow.phase(one) for one in flow.plan.stages}
