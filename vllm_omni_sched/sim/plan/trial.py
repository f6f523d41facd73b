"""Run one replica under its requests."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.load import KEY, load_config
from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.sim.engine.limits import make_core
from vllm_omni_sched.sim.engine.server import EngineServer
from vllm_omni_sched.sim.kernel import Simulator
from vllm_omni_sched.sim.measure import Histogram
from vllm_omni_sched.sim.plan.load import Part
from vllm_omni_sched.sim.plan.systems import Choices, System
from vllm_omni_sched.sim.scenario.scenario import Slo
from vllm_omni_sched.sim.server import Job

_CHECKS, _FIRST = 40, 10  # times at which a run may be stopped early, and the first of them
_DRAIN_SECONDS = 120.0
_SURE = 1e-6


@dataclass(frozen=True)
class Served:
    """What the clients of one replica saw.

    ``attainment``: fraction of the requests within the SLO; of a run that was stopped, that of those that had arrived,
    and below what was needed. ``by_block``: requests within the SLO, and all, of each block of time. ``busy``: fraction
    of the time in which steps ran. ``cached``: fraction of the prompt tokens that the prefix cache had. Times in
    seconds.
    """

    requests: int
    attainment: float
    by_block: tuple[tuple[int, int], ...] = ()
    ttft_p50: float = 0.0
    ttft_p99: float = 0.0
    gap_p50: float = 0.0
    gap_p99: float = 0.0
    busy: float = 0.0
    cached: float = 0.0
    preempted: int = 0
    stopped: bool = False


IMPOSSIBLE = Served(0, 0.0, stopped=True)
"""Result of a system that cannot serve a request, or cannot hold the model."""


def serve(choices: Choices, system: System, part: Part, slo: Slo, whole: bool = False, better: str = "") -> Served:
    """Simulate one replica; a run that cannot meet the SLO any more is stopped, unless ``whole``.

    Args:
        better: a resource of which there is twice as much.
    """
    if not part.requests:
        return Served(0, 1.0)
    try:
        return _serve(choices, system, part, slo, whole, better)
    except ConfigError:  # the model does not fit beside this memory, or a request in the KV cache
        return IMPOSSIBLE


def _serve(choices: Choices, system: System, part: Part, slo: Slo, whole: bool, better: str) -> Served:
    costs = choices.costs(system.layout, system.flags, better)
    limits = choices.limits(system.flags, costs, better)
    config = OmniSchedConfig() if system.options is None else load_config({KEY: dict(system.options)})
    sim, itl = Simulator(), Histogram()
    ended: dict[int, tuple[Job, float]] = {}
    engine = EngineServer(
        sim, costs, limits, make_core(config, limits), lambda job: ended.update({id(job): (job, sim.now)}), itl
    )
    jobs = [Job(request, 0) for request in part.requests]
    for job in jobs:
        sim.at(job.request.arrival, engine.submit, job)
    allowed = (1.0 - slo.attainment) * len(jobs)
    stopped = False
    for check in range(1, _CHECKS + 1):
        until = part.seconds * check / _CHECKS + (_DRAIN_SECONDS if check == _CHECKS else 0.0)
        sim.run(until)
        if _FIRST <= check < _CHECKS and not whole and _missed(jobs, ended, sim.now, slo) > allowed:
            stopped = True
            break
    engine.catch_up()
    within = [id(job) in ended and _meets(job, ended[id(job)][1], slo) for job in jobs]
    attainment = sum(within) / len(jobs)
    if stopped:
        arrived = sum(job.request.arrival <= sim.now for job in jobs)
        attainment = min(1.0 - _missed(jobs, ended, sim.now, slo) / arrived, slo.attainment - _SURE)
    ttft = [min(job.first, sim.now) - job.request.arrival for job in jobs if job.request.arrival <= sim.now]
    cache, busy = engine.prompts.cache, engine.busy_seconds()
    steps = busy["llm"] + busy["encode"]
    p50, p99 = np.quantile(ttft, [0.5, 0.99]).tolist()
    return Served(
        len(jobs),
        attainment,
        _by_block(part.blocks, within),
        p50,
        p99,
        itl.quantile(0.5),
        itl.quantile(0.99),
        min(1.0, steps / min(part.seconds, sim.now)),
        cache.found / cache.asked if cache is not None and cache.asked else 0.0,
        engine.preempted,
        stopped,
    )


def _meets(job: Job, end: float, slo: Slo) -> bool:
    tokens = job.request.output_tokens
    gap = job.largest_gap
    if slo.itl_of == "mean":
        gap = (end - job.first) / (tokens - 1) if tokens > 1 else 0.0
    return job.first - job.request.arrival <= slo.ttft_seconds and gap <= slo.itl_seconds


def _missed(jobs: Sequence[Job], ended: dict[int, tuple[Job, float]], now: float, slo: Slo) -> int:
    """Return the requests that have missed the SLO by now, for certain."""
    missed = 0
    for job in jobs:
        if job.request.arrival > now:
            break
        if id(job) in ended:
            missed += not _meets(job, ended[id(job)][1], slo)
        else:
            missed += min(job.first, now) - job.request.arrival > slo.ttft_seconds
    return missed


def _by_block(blocks: Sequence[int], within: Sequence[bool]) -> tuple[tuple[int, int], ...]:
    found: dict[int, list[int]] = {}
    for block, met in zip(blocks, within, strict=True):
        counts = found.setdefault(block, [0, 0])
        counts[0] += met
        counts[1] += 1
    return tuple((met, number) for met, number in found.values())
