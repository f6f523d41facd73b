"""Run one engine under one workload and record what its clients see, for learning and tuning.

There is no gate, no other stage and no failure.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import takewhile

import numpy as np

from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.resource.batch_size import BatchControl
from vllm_omni_sched.sim.costs.base import EngineCosts
from vllm_omni_sched.sim.engine.limits import EngineLimits, make_core
from vllm_omni_sched.sim.engine.server import EngineServer
from vllm_omni_sched.sim.kernel import Simulator
from vllm_omni_sched.sim.measure import Histogram, Outcome, Record
from vllm_omni_sched.sim.server import Job
from vllm_omni_sched.sim.work import Request


@dataclass(frozen=True)
class EpisodeResult:
    """Client-side results of one episode. Times in seconds; requests that had not ended by its end are not ``within``.

    ``attainment``: fraction of the requests within the SLO; ``goodput``: these per second; ``throughput``: output
    tokens of finished requests per second.
    """

    requests: int
    attainment: float
    goodput: float
    throughput: float
    ttft_p50: float
    ttft_p99: float
    itl_p99: float

    def as_dict(self) -> dict[str, float]:
        """Return the values by name."""
        return asdict(self)


def run_episode(
    requests: Iterable[Request],
    costs: EngineCosts,
    limits: EngineLimits,
    options: OmniSchedConfig,
    seconds: float,
    targets: tuple[float, float],
    prefill: BatchControl | None = None,
    batch: BatchControl | None = None,
    drain_seconds: float = 60.0,
) -> EpisodeResult:
    """Serve the requests that arrive within ``seconds``, for ``drain_seconds`` more.

    Args:
        requests: in order of arrival.
        targets: TTFT and inter-token latency of the SLO, in seconds.
        prefill: replaces the control that ``options`` name; ``batch``: likewise.

    Raises:
        ConfigError: a request never fits into the KV cache, or has an item that the model cannot encode.
    """
    sim, itl = Simulator(), Histogram()
    ended: list[tuple[Job, float]] = []
    core = make_core(options, limits)
    if prefill is not None:
        core.limits.prefill = prefill
    if batch is not None:
        core.limits.batch = batch
    engine = EngineServer(sim, costs, limits, core, lambda job: ended.append((job, sim.now)), itl)
    arrived = 0
    for request in takewhile(lambda one: one.arrival < seconds, requests):
        sim.at(request.arrival, engine.submit, Job(request, 0))
        arrived += 1
    sim.run(seconds + drain_seconds)
    records = [_record(job, when) for job, when in ended]
    within = sum(record.meets(*targets) for record in records)
    # requests without a first token count as never
    ttft = np.array([record.ttft for record in records] + [np.inf] * (arrived - len(records)) or [0.0])
    p50, p99 = np.quantile(ttft, [0.5, 0.99], method="higher")
    return EpisodeResult(
        arrived,
        within / arrived if arrived else 0.0,
        within / seconds,
        sum(record.output_tokens for record in records) / seconds,
        float(min(p50, seconds + drain_seconds)),
        float(min(p99, seconds + drain_seconds)),
        itl.quantile(0.99),
    )


def _record(job: Job, when: float) -> Record:
    request = job.request
    return Record(
        request.number,
        request.arrival,
        request.modality,
        request.sla,
        job.first,
        when,
        request.output_tokens,
        job.largest_gap,
        Outcome.DONE,
    )
