"""Simulate a measured round on the engine: with the same arrivals and options."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from random import Random
from typing import Any

from benchmarks.mixed import VARIANTS
from benchmarks.sim_fidelity.pace import costs_at
from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.sim.costs.measured import Calibration, MeasuredCosts, UnsteadyCosts
from vllm_omni_sched.sim.engine.limits import EngineLimits, make_core
from vllm_omni_sched.sim.engine.server import EngineServer
from vllm_omni_sched.sim.kernel import Simulator
from vllm_omni_sched.sim.measure import Histogram
from vllm_omni_sched.sim.work import Item, Job, Request

BATCHED_TOKENS, SEQUENCES, LANES = 2048, 64, 2
"""As `benchmarks.mixed.serve` starts its engines; and the encoder processes that ours has on two cores."""


WARM_UP_SECONDS, EMBEDS = 30.0, 576


class AfterWarmUp(Histogram):
    """Ignores gaps before the round begins."""

    __slots__ = ("_sim", "_within")

    def __init__(self, sim: Simulator, within: Histogram) -> None:
        super().__init__()
        self._sim, self._within = sim, within

    def add(self, seconds: float, weight: float = 1.0, *_: Any) -> None:
        if self._sim.now >= WARM_UP_SECONDS:
            self._within.add(seconds, weight)


def simulate(usual: MeasuredCosts, measured: dict[str, Any], itl: Histogram) -> list[float]:
    """Return the TTFT of each request of a measured round, in seconds; ``itl`` collects the gaps.

    The engine has served something before, as the real one has: its policies know what an image costs. It is as fast as
    the machine was around the round.
    """
    requests, steady = measured["requests"], at_pace(usual, pace_of(usual, measured["references"]))
    sim, costs = Simulator(), UnsteadyCosts(steady, Random(len(requests)))
    ours = VARIANTS[measured["variant"]]
    limits = EngineLimits(
        costs.kv_tokens,
        SEQUENCES,
        BATCHED_TOKENS,
        BATCHED_TOKENS,
        BATCHED_TOKENS,
        lane_items=LANES,
        paced=True,
        lane_beside=True,
    )
    core = make_core(OmniSchedConfig(**(ours or {})), limits)
    done: list[Job] = []
    server = EngineServer(sim, costs, limits, core, done.append, AfterWarmUp(sim, itl))
    before = [Job(request, 0) for request in warm_up()]
    jobs = [Job(request, 0) for request in trace(requests, len(before))]
    for job in before + jobs:
        sim.at(job.request.arrival, server.submit, job)
    sim.run()
    if len(done) != len(before) + len(jobs):
        raise RuntimeError(f"{len(before) + len(jobs) - len(done)} requests never left the simulated engine")
    return [job.first - job.request.arrival for job in jobs]


def pace_of(usual: MeasuredCosts, references: Sequence[dict[str, float]]) -> float:
    """Return how long the steps of the references took, as a multiple of what the calibration predicts."""
    parts = [one["seconds"] / usual.step_seconds(1, round(one["context"]), 0, 0.0) for one in references]
    return statistics.fmean(parts)


def at_pace(costs: MeasuredCosts, pace: float) -> MeasuredCosts:
    """Return the costs with steps that take ``pace`` times as long; encodes are bound by operations, not by memory."""
    calibration = costs.calibration.model_dump()
    calibration["step"] = costs_at(pace, calibration["step"])
    return MeasuredCosts(Calibration.model_validate_json(json.dumps(calibration)))


def warm_up() -> list[Request]:
    """Return two requests with images, the second beside one that decodes; all end before the round begins."""
    images = [Item("image", EMBEDS, -1 - i) for i in range(2)]
    return [
        Request(0, 0.0, 50, 20, (images[0],)),
        Request(1, 5.0, 50, 300),
        Request(2, 5.5, 50, 20, (images[1],)),
    ]


def trace(requests: Sequence[dict[str, Any]], first: int = 0) -> list[Request]:
    """Return the arrivals of a round, after the warm-up, with numbers from ``first`` on; all images differ."""
    found = []
    ordered = sorted(requests, key=lambda request: request["at"])
    for number, one in enumerate(ordered, first):
        items = tuple(Item("image", embeds, 100 * number + i) for i, embeds in enumerate(one["embeds"]))
        found.append(Request(number, WARM_UP_SECONDS + one["at"], one["text_tokens"], one["output_tokens"], items))
    return found
