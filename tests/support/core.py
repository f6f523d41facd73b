"""Pipelines of the core alone: events by hand, actions as plain tuples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

from vllm_omni_sched.config.stage_options import StageSchedConfig
from vllm_omni_sched.core.pipeline import events as e
from vllm_omni_sched.core.pipeline.context import PipelineContext
from vllm_omni_sched.core.pipeline.core import PipelineCore
from vllm_omni_sched.core.pipeline.requests import PipelineRequest, StageWork
from vllm_omni_sched.graph.stages import Stage, StageGraph, StageKind
from vllm_omni_sched.resource.pipeline.stage_cost import Features


@contextmanager
def validated() -> Iterator[None]:
    """Check the laws of conservation after every event of every core."""
    plain = PipelineCore.handle

    def handle(core: PipelineCore, event: e.Event, now: float) -> list[e.Action]:
        actions = plain(core, event, now)
        core.validate()
        return actions

    PipelineCore.handle = handle  # type: ignore[method-assign]
    try:
        yield
    finally:
        PipelineCore.handle = plain  # type: ignore[method-assign]


class Line:
    """Pipeline of stages in a line; ``kinds`` by stage, each with its number of replicas.

    ``options``: as under ``omni_sched`` in the deploy YAML.
    """

    def __init__(self, *kinds: StageKind, replicas: int = 1, at_once: int = 1, **options: Any) -> None:
        stages = [
            Stage(at, f"stage{at}", kind, (at - 1,) if at else (), final_output=at == len(kinds) - 1, replicas=replicas)
            for at, kind in enumerate(kinds)
        ]
        self.now = 0.0
        self.core = PipelineCore(PipelineContext(StageSchedConfig(**options), StageGraph.of(stages), Random(0)))
        for at in range(len(kinds)):
            self.core.add_stage(at, at_once, range(replicas))
        self.features = Features(prompt_tokens=10_000)  # a second, so that no place is about to be free

    def tell(self, event: e.Event) -> list[e.Action]:
        """Pass an event to the core."""
        return self.core.handle(event, self.now)

    def arrive(self, name: str, stages: int | None = None, **known: Any) -> PipelineRequest:
        """Let a request arrive that visits so many stages."""
        path = tuple(range(len(self.core.stages) if stages is None else stages))
        context = self.core.context
        request = PipelineRequest(name, self.now, context.classes.default, path=path, **known)
        request.features.update(dict.fromkeys(path, self.features))
        self.tell(e.Arrived(request))
        return request

    def submit(self, request: PipelineRequest, stage_id: int = 0, key: str | None = None) -> list[str]:
        """Submit a request to a stage, and return the requests that start."""
        work = StageWork(request_id=request.request_id, stage_id=stage_id, known=request, arrived=self.now, key=key)
        if isinstance(self.tell(e.Submitted(work, self.features))[0], e.Lead):
            return started(self.tell(e.Waits(work)))
        return []

    def come(self, name: str, key: str | None = None, **known: Any) -> list[str]:
        """Let a request arrive and go to the first stage."""
        return self.submit(self.arrive(name, **known), key=key)

    def finish(self, name: str, stage_id: int = 0, ok: bool = True) -> tuple[str, ...]:
        """End the work of a request, and return those that get its output."""
        return next(one.receivers for one in self.tell(e.Finished(stage_id, name, ok)) if isinstance(one, e.Ended))

    def tick(self) -> list[str]:
        """Return the requests that start now."""
        return started(self.tell(e.Tick()))


def started(actions: list[e.Action]) -> list[str]:
    """Return the requests that start, each with its replica; they count as sent."""
    found = []
    for action in actions:
        if isinstance(action, e.Start):
            action.work.sent = True
            found.append(f"{action.work.request_id}@{action.work.replica_id}")
    return found
