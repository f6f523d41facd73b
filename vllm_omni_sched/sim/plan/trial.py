"""Run one replica, or one group of prefill and decode replicas, under its requests."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.load import KEY, load_config
from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.sim.engine.limits import make_core
from vllm_omni_sched.sim.engine.server import EngineServer
from vllm_omni_sched.sim.engine.transfer import PrefillDecode
from vllm_omni_sched.sim.kernel import Simulator
from vllm_omni_sched.sim.measure import Histogram
from vllm_omni_sched.sim.plan.load import Part, Patience
from vllm_omni_sched.sim.plan.systems import Choices, System
from vllm_omni_sched.sim.scenario.scenario import Slo
from vllm_omni_sched.sim.server import Done, Job

_CHECKS, _FIRST = 40, 10  # times at which a run may be stopped early, and the first of them
_DRAIN_SECONDS = 120.0
_SURE = 1e-6


@dataclass(frozen=True)
class Served:
    """What the clients of one replica, or of one group, saw.

    ``attainment``: fraction of the requests within the SLO; of a run that was stopped, that of those that had arrived,
    and below what was needed. ``by_block``: requests within the SLO, and all, of each block of time. ``busy``: fraction
    of the time in which steps ran; of a group, that of decode replicas, and ``prefill_busy`` that of the others.
    ``cached``: fraction of the prompt tokens that the prefix cache had. ``gave_up``: clients that left without a token.
    Times in seconds.
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
    gave_up: int = 0
    prefill_busy: float | None = None


IMPOSSIBLE = Served(0, 0.0, stopped=True)
"""Result of a system that cannot serve a request, or cannot hold the model."""


def serve(choices: Choices, system: System, part: Part, slo: Slo, whole: bool = False, better: str = "") -> Served:
    """Simulate one replica or group; a run that cannot meet the SLO any more is stopped, unless ``whole``.

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
    sim, itl = Simulator(), Histogram()
    ended: dict[int, tuple[Job, float]] = {}
    served = _engines(choices, system, better, sim, itl, lambda job: ended.update({id(job): (job, sim.now)}))
    jobs = [Job(request, 0) for request in part.requests]
    for job in jobs:
        sim.at(job.request.arrival, served.submit, job)
    gave_up = _give_up(sim, served, jobs, part.patience) if part.patience is not None else {}
    allowed = (1.0 - slo.attainment) * len(jobs)
    stopped = False
    for check in range(1, _CHECKS + 1):
        until = part.seconds * check / _CHECKS + (_DRAIN_SECONDS if check == _CHECKS else 0.0)
        sim.run(until)
        if _FIRST <= check < _CHECKS and not whole and _missed(jobs, ended, gave_up, sim.now, slo) > allowed:
            stopped = True
            break
    served.catch_up()
    within = [id(job) in ended and _meets(job, ended[id(job)][1], slo) for job in jobs]
    attainment = sum(within) / len(jobs)
    if stopped:
        arrived = sum(job.request.arrival <= sim.now for job in jobs)
        attainment = min(1.0 - _missed(jobs, ended, gave_up, sim.now, slo) / arrived, slo.attainment - _SURE)
    ttft = [
        gave_up.get(id(job), min(job.first, sim.now) - job.request.arrival)
        for job in jobs
        if job.request.arrival <= sim.now
    ]
    seconds = min(part.seconds, sim.now)
    p50, p99 = np.quantile(ttft, [0.5, 0.99]).tolist()
    decoding: Sequence[EngineServer] = served.decodes if isinstance(served, PrefillDecode) else [served]
    prefilling: Sequence[EngineServer] = served.prefills if isinstance(served, PrefillDecode) else []
    return Served(
        len(jobs),
        attainment,
        _by_block(part.blocks, within),
        p50,
        p99,
        itl.quantile(0.5),
        itl.quantile(0.99),
        _busy(decoding, seconds),
        _cached(prefilling or decoding),
        sum(one.preempted for one in decoding),
        stopped,
        len(gave_up),
        _busy(prefilling, seconds) if prefilling else None,
    )


def _engines(
    choices: Choices, system: System, better: str, sim: Simulator, itl: Histogram, done: Done
) -> EngineServer | PrefillDecode:
    costs = choices.costs(system.layout, system.flags, better)
    limits = choices.limits(system.flags, costs, better)
    config = OmniSchedConfig() if system.options is None else load_config({KEY: dict(system.options)})
    other = system.prefill
    if other is None:
        return EngineServer(sim, costs, limits, make_core(config, limits), done, itl)
    first = choices.costs(other.layout, other.flags, better)
    return PrefillDecode(
        sim,
        (first, choices.limits(other.flags, first, better), other.replicas),
        (costs, limits, other.decodes),
        lambda of, _: make_core(config, of),
        *choices.link_of(system, better),
        done,
        itl,
    )


def _give_up(
    sim: Simulator, served: EngineServer | PrefillDecode, jobs: Sequence[Job], patience: Patience
) -> dict[int, float]:
    """Let clients leave that have no first token when their patience ends; the table gets the patience of these."""
    gone: dict[int, float] = {}

    def leave(job: Job) -> None:
        if job.first > sim.now:
            gone[id(job)] = sim.now - job.request.arrival
            served.abort(job)

    for job in jobs:
        sim.at(job.request.arrival + patience.seconds(job.request.number), leave, job)
    return gone


def _busy(engines: Sequence[EngineServer], seconds: float) -> float:
    """Return the fraction of the time in which steps ran, of all engines."""
    kinds = [one.busy_seconds() for one in engines]
    return min(1.0, sum(one["llm"] + one["encode"] for one in kinds) / (seconds * len(engines)))


def _cached(engines: Sequence[EngineServer]) -> float:
    """Return the fraction of the prompt tokens that the prefix caches had."""
    caches = [one.prompts.cache for one in engines if one.prompts.cache is not None]
    asked = sum(one.asked for one in caches)
    return sum(one.found for one in caches) / asked if asked else 0.0


def _meets(job: Job, end: float, slo: Slo) -> bool:
    tokens = job.request.output_tokens
    gap = job.largest_gap
    if slo.itl_of == "mean":
        gap = (end - job.first) / (tokens - 1) if tokens > 1 else 0.0
    return job.first - job.request.arrival <= slo.ttft_seconds and gap <= slo.itl_seconds


def _missed(
    jobs: Sequence[Job], ended: dict[int, tuple[Job, float]], gave_up: dict[int, float], now: float, slo: Slo
) -> int:
    """Return the requests that have missed the SLO by now, for certain."""
    missed = 0
    for job in jobs:
        if job.request.arrival > now:
            break
        if id(job) in ended:
            missed += not _meets(job, ended[id(job)][1], slo)
        elif id(job) in gave_up:
            missed += 1
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
