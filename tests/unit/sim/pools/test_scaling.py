"""Links between pools, and replicas that come and go with the load."""

from __future__ import annotations

import pytest

from tests.support.pools import one_second, request, run
from vllm_omni_sched.monitor.forecast.load import ForecastOptions
from vllm_omni_sched.sim.kernel import Simulator
from vllm_omni_sched.sim.pools.autoscale import ForecastScaler, ReactiveScaler
from vllm_omni_sched.sim.pools.pipeline import Links, Pipeline
from vllm_omni_sched.sim.pools.pool import Pool, RoundRobinChooser, StageSpec
from vllm_omni_sched.sim.scenario.scenario import Autoscale
from vllm_omni_sched.sim.scenario.stages import Link


def test_links_take_time_one_message_after_the_other():
    def edge(sim):
        # 200 bytes each: a second
        return Links(sim, Link(bytes_per_second=200.0, latency_seconds=0.25, bytes_per_embed=2.0))

    specs = [StageSpec("encoder"), StageSpec("llm", replicas=2)]
    come = [request(0, content=1), request(1, at=0.1, content=2)]
    records, _ = run(come, specs, links={(0, 1): edge})
    assert records[0].end == pytest.approx(1 + 1.25 + 1)
    assert records[1].end == pytest.approx(2 + 1.25 + 1)


def test_a_replica_that_drains_leaves_empty_and_is_paid_for_until_then():
    def scale(pipeline):
        pipeline.sim.at(0.5, lambda _: pipeline.scale(pipeline.pools[0], 1))

    records, pipeline = run([request(0), request(1)], [StageSpec("llm", replicas=2)], before=scale)
    assert [records[n].end for n in (0, 1)] == [1.0, 1.0]
    assert pipeline.pools[0].held == 1
    assert pipeline.pools[0].replica_seconds() == pytest.approx(2.0)


def test_desired_replicas_are_those_of_the_published_rule():
    sim = Simulator()
    pipeline = Pipeline(
        sim, [Pool(sim, 0, StageSpec("llm"), one_second(sim), RoundRobinChooser())], [], print, {"": (0,)}
    )
    scaler = ReactiveScaler(pipeline, 0, Autoscale(stage="llm", maximum=64, at_once=10, utilisation=0.5))
    assert scaler.desired(present=40, replicas=4) == 8  # ceil(4 x 1.0 / 0.5)
    assert scaler.desired(present=21, replicas=4) == 4  # within the tolerance
    assert scaler.desired(present=5, replicas=4) == 1


def test_reactive_scaling_follows_the_load_up_at_once_and_down_late():
    come = [request(number, at=number * 0.25) for number in range(800)]  # 4 in a second, for 200 seconds
    options = Autoscale(
        stage="llm", maximum=10, at_once=1, utilisation=0.8, every_seconds=5.0, stabilisation_seconds=60.0
    )
    seen = []

    def scale(pipeline):
        ReactiveScaler(pipeline, 0, options)
        for when in (0.0, 60.0, 150.0):
            pipeline.sim.at(when, lambda _: seen.append(len(pipeline.pools[0].live)))

    records, _ = run(come, [StageSpec("llm", startup_seconds=2.0)], before=scale)
    assert len(records) == 800
    assert seen[0] == 1
    assert seen[1] == 10
    assert 5 <= seen[2] < 10


def test_forecast_scaling_has_replicas_for_what_is_to_come():
    come = [request(number, at=number * 0.25) for number in range(800)]
    seen = []

    def scale(pipeline):
        ForecastScaler(
            pipeline,
            {0: Autoscale(stage="llm", maximum=12, capacity=1.0)},
            ForecastOptions(bin_seconds=10.0, season_bins=1, horizon_seconds=20.0),
        )
        for when in (5.0, 60.0):
            pipeline.sim.at(when, lambda _: seen.append(len(pipeline.pools[0].live)))

    records, _ = run(come, [StageSpec("llm", startup_seconds=2.0)], before=scale)
    assert len(records) == 800
    assert seen[0] == 1
    assert 5 <= seen[1] <= 8  # 4 in a second at 80 % each, and what the interval adds
