"""Pipelines of servers that do one request at a time, in a second each."""

from __future__ import annotations

import random

from vllm_omni_sched.config.stage_options import StageSchedConfig
from vllm_omni_sched.sim.kernel import Simulator
from vllm_omni_sched.sim.pools.gated import GatedPool, Orchestration
from vllm_omni_sched.sim.pools.pipeline import Pipeline
from vllm_omni_sched.sim.pools.pool import Pool, RoundRobinChooser
from vllm_omni_sched.sim.servers import QueueServer
from vllm_omni_sched.sim.work import Item, Request


def request(number, at=0.0, content=None, modality="image", embeds=100, **more):
    items = () if content is None else (Item(modality, embeds, content),)
    return Request(number, at, 10, 1, items, **more)


def one_second(sim):
    return lambda _, done: QueueServer(sim, done, 1, lambda *_: 1.0, random.Random(0))


def run(requests, specs, paths=None, options=None, **how):
    """Return the records of a pipeline by number, and the pipeline. Its replicas do one request a second, in turn."""
    sim, records = Simulator(), {}
    paths = paths or {"": tuple(range(len(specs)))}
    orchestration = None
    if options is None:
        pools = [Pool(sim, stage, spec, one_second(sim), RoundRobinChooser()) for stage, spec in enumerate(specs)]
    else:
        orchestration = Orchestration(sim, StageSchedConfig(**options), specs, list(paths.values()), random.Random(1))
        pools = [GatedPool(sim, stage, spec, one_second(sim), orchestration) for stage, spec in enumerate(specs)]
    keep = how.pop("before", lambda pipeline: None)
    links = {edge: make(sim) for edge, make in how.pop("links", {}).items()}

    def record(one):
        records[one.number] = one

    pipeline = Pipeline(sim, pools, requests, record, paths, orchestration, links=links, **how)
    keep(pipeline)
    sim.run()
    return records, pipeline
