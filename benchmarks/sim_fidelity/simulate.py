"""One measured round once more, on the simulated engine: the same arrivals, the same options."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from benchmarks.mixed import VARIANTS
from vllm_omni_sched.config import OmniSchedConfig
from vllm_omni_sched.sim.costs.measured import MeasuredCosts
from vllm_omni_sched.sim.costs.unsteady import UnsteadyCosts
from vllm_omni_sched.sim.engine.limits import EngineLimits
from vllm_omni_sched.sim.engine.policies import EnginePolicies
from vllm_omni_sched.sim.engine.server import EngineServer
from vllm_omni_sched.sim.kernel import Simulator
from vllm_omni_sched.sim.measure import Histogram
from vllm_omni_sched.sim.server import Job
from vllm_omni_sched.sim.work import Item, Request

BATCHED_TOKENS, SEQUENCES, LANES = 2048, 64, 2
"""As `benchmarks.mixed.serve` starts its engines; and the encoder processes that ours has on two cores."""


def simulate(steady: MeasuredCosts, variant: str, requests: Sequence[dict[str, Any]], itl: Histogram) -> list[float]:
    """TTFT of each request, in seconds; ``itl`` takes the gaps."""
    sim, costs = Simulator(), UnsteadyCosts(steady, Random(len(requests)))
    ours = VARIANTS[variant]
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
    policies = EnginePolicies(OmniSchedConfig(**(ours or {})), limits)
    done: list[Job] = []
    server = EngineServer(sim, costs, limits, policies, done.append, itl)
    jobs = [Job(request, 0) for request in trace(requests)]
    for job in jobs:
        sim.at(job.request.arrival, server.submit, job)
    sim.run()
    if len(done) != len(jobs):
        raise RuntimeError(f"{len(jobs) - len(done)} of {len(jobs)} requests never left the simulated engine")
    return [job.first - job.request.arrival for job in jobs]


def trace(requests: Sequence[dict[str, Any]]) -> list[Request]:
    """What arrived. Every image is another one."""
    found = []
    ordered = sorted(requests, key=lambda request: request["at"])
    for number, one in enumerate(ordered):
        items = tuple(Item("image", embeds, 100 * number + i) for i, embeds in enumerate(one["embeds"]))
        found.append(Request(number, one["at"], one["text_tokens"], one["output_tokens"], items))
    return found
