"""A scenario from its file to its result."""

from pathlib import Path

import pytest

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.core.engine.ledger import AheadLedger
from vllm_omni_sched.graph.order import WaitingOrder
from vllm_omni_sched.graph.waiting_queue import WaitingQueue
from vllm_omni_sched.monitor.recovery.policy import Recovery
from vllm_omni_sched.resource.engine.lane import EncodeShare
from vllm_omni_sched.resource.engine.prefill_budget import AdaptivePrefill
from vllm_omni_sched.sim.cluster import Cluster
from vllm_omni_sched.sim.engine.requests import BySla
from vllm_omni_sched.sim.kernel import Simulator
from vllm_omni_sched.sim.output import Spans
from vllm_omni_sched.sim.run import simulate
from vllm_omni_sched.sim.scenario.loader import load
from vllm_omni_sched.sim.scenario.scenario import Scenario

PICTURES = """
name = "pictures"
seed = 3
duration_seconds = 40.0
warm_up_seconds = 5.0
[workload]
kind = "servegen-mm-image"
rate = 6.0
[[stages]]
name = "llm"
kind = "engine"
model = "qwen2.5-vl-7b"
replicas = 2
"""
OURS = {
    "policy.encode_ahead": True,
    "policy.waiting_order": "sla",
    "policy.prefill_control": "adaptive",
    "policy.control_target_ms": 80.0,
}
VIDEOS = """
name = "videos"
duration_seconds = 60.0
[workload]
kind = "video-clips"
rate = 0.5
[[stages]]
name = "video"
kind = "video"
decoders = "nvdec"
per_replica = 40
[[stages]]
name = "encode"
kind = "encoder"
model = "qwen2.5-vl-7b"
replicas = 2
link = { bytes_per_second = 2.0e11, bytes_per_embed = 7168.0 }
[[stages]]
name = "llm"
kind = "engine"
model = "qwen2.5-vl-7b"
replicas = 6
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Scenario:
    return written(tmp_path, PICTURES)


def written(folder: Path, text: str, **overrides: object) -> Scenario:
    path = folder / "scenario.toml"
    path.write_text(text)
    return load(path, overrides)


def test_every_request_leaves_once_and_those_before_the_warm_up_are_not_measured(scenario: Scenario) -> None:
    result = simulate(scenario)
    numbers = [record.number for record in result.records]
    assert len(numbers) == len(set(numbers)) > 150
    assert sorted(numbers) == list(range(min(numbers), max(numbers) + 1))
    assert min(record.arrival for record in result.records) >= 5.0
    assert result.lost == 0
    assert result.device_seconds["llm"] == pytest.approx(2 * (result.seconds - 5.0))


def test_tokens_are_counted_once(scenario: Scenario) -> None:
    result = simulate(scenario.model_copy(update={"warm_up_seconds": 0.0}))
    assert result.gaps.count == sum(record.output_tokens - 1 for record in result.records)


def test_ours_keeps_tokens_coming_while_pictures_are_encoded(tmp_path: Path) -> None:
    stock = simulate(written(tmp_path, PICTURES))
    ours = simulate(written(tmp_path, PICTURES, **OURS))
    assert ours.gaps.quantile(0.99) < 0.5 * stock.gaps.quantile(0.99)
    assert ours.attainment > stock.attainment
    assert ours.counters["encode_lane_would_stall_decode"] > 0


def test_the_same_scenario_gives_the_same_records(tmp_path: Path) -> None:
    first, again = (simulate(written(tmp_path, PICTURES, **OURS)) for _ in range(2))
    assert first.records == again.records
    other = simulate(written(tmp_path, PICTURES, **OURS, seed=4))
    assert other.records != first.records


def test_videos_are_decoded_encoded_and_answered_where_the_scenario_says(tmp_path: Path) -> None:
    result = simulate(written(tmp_path, VIDEOS))
    assert len(result.records) > 15
    assert set(result.busy_seconds["encode"]) == {"encode"}
    assert result.busy_seconds["llm"]["encode"] == 0.0
    assert result.busy_seconds["video"]["decode"] > 0
    assert result.device_seconds["video"] == 0.0


def test_the_policies_of_a_simulation_are_the_real_ones(tmp_path: Path) -> None:
    scenario = written(tmp_path, PICTURES, **OURS, orchestration={})
    sim = Simulator()
    cluster = Cluster(scenario, sim, lambda record: None, None)
    (engine, _) = cluster.engine_servers()
    assert type(engine.waiting) is BySla
    assert type(engine.waiting.queue) is WaitingQueue
    assert type(engine.waiting.queue.order) is WaitingOrder
    assert engine.core.ahead is not None
    assert type(engine.core.ahead.place) is EncodeShare
    assert type(engine.core.ahead.ledger) is AheadLedger
    assert type(engine.core.limits.prefill) is AdaptivePrefill
    assert cluster.pipeline.orchestration is not None
    assert cluster.pipeline.orchestration.core.recovery is not None
    assert type(cluster.pipeline.orchestration.core.recovery.policy) is Recovery


def test_replicas_that_die_lose_nobody_with_recovery_and_everybody_they_had_without(tmp_path: Path) -> None:
    failing = PICTURES + '[[failures]]\nstage = "llm"\nat_seconds = [9.0, 20.0]\nrestart_seconds = 3.0\n'
    stock = simulate(written(tmp_path, failing))
    ours = simulate(written(tmp_path, failing, orchestration={}))
    failed = [record for record in stock.records if record.outcome != "done"]
    assert failed
    assert all(record.outcome == "done" for record in ours.records)
    assert len(ours.records) == len(stock.records)
    assert max(record.attempts for record in ours.records) > 1


def test_steps_are_in_the_trace(scenario: Scenario, tmp_path: Path) -> None:
    spans = Spans(until=10.0)
    simulate(scenario, spans=spans)
    assert len(spans) > 100


def test_a_model_that_does_not_fit_is_named_with_its_stage(tmp_path: Path) -> None:
    scenario = written(tmp_path, PICTURES, **{"stages.llm.model": "qwen2.5-vl-72b"})
    with pytest.raises(ConfigError, match=r"stage 'llm': .*does not fit on 1 x 'a100-80gb'.*bytes are missing"):
        simulate(scenario)
