"""The registry of stage metrics: complete, well named, and on a page as the board has it."""

import dataclasses
import re

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from vllm_omni_sched.monitor.counts import Histogram
from vllm_omni_sched.monitor.metrics import METRICS, PREFIX
from vllm_omni_sched.monitor.stage_board import EdgeFacts, LoadFacts, ReplicaFacts, StageBoard, StageFacts
from vllm_omni_sched.monitor.stage_metrics import STAGE_METRICS, Scope, StageCollector, samples

FACTS = {Scope.REPLICA: ReplicaFacts, Scope.STAGE: StageFacts, Scope.EDGE: EdgeFacts, Scope.MODALITY: LoadFacts}


def page_of(board: StageBoard) -> dict[tuple[str, frozenset], float]:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StageCollector(board))
    return {
        (sample.name.removeprefix(PREFIX), frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }


def key(name: str, **labels: object) -> tuple[str, frozenset]:
    return name, frozenset((label, str(value)) for label, value in labels.items())


@pytest.fixture
def board():
    board = StageBoard([0, 1], anomalies=["stuck_queue"], incidents=["died"], reasons=["stalled", "waited"])
    board.submitted(0, 1, "a", 0.0)
    board.started(0, 1, "a", 0.3)
    board.finished(0, 1, "a", 0.7)
    board.submitted(0, 1, "b", 1.0)
    board.started(0, 1, "b", 1.0)
    board.submitted(0, 1, "c", 1.0)
    board.batch(0, 1, 3)
    board.batch_limit(0, 1, 4)
    board.memory(0, 1, 1000, 2000)
    board.edge(0, 1, 0.02)
    board.moved(0, 1, "put", 2, 500, 0.03)
    board.moved(0, 1, "get", 2, 500, 0.04)
    board.cache(0, 1, "prefix", 30, 10)
    board.cache(0, 1, "encoder", 3, 1)
    board.looked_up(0, 1, hit=True)
    board.restarted(0, 1)
    board.redispatched(0, 1, 2)
    board.incident(0, 1, "died")
    board.anomaly(1, "stuck_queue")
    board.given_up(1, "stalled")
    board.merged(0, 6)
    board.credits(1, 9)
    board.load("image", observed=1.5, forecast=2.5)
    return board


def test_a_page_says_what_the_board_was_told(board):
    page, of = page_of(board), {"stage": 0, "replica": 1}
    expected = {
        key("stage_requests_total", outcome="finished", **of): 1,
        key("stage_requests_total", outcome="lost", **of): 0,
        key("stage_latency_seconds_bucket", le="0.5", **of): 0,
        key("stage_latency_seconds_bucket", le="1.0", **of): 1,
        key("stage_latency_seconds_sum", **of): 0.7,
        key("stage_queue_seconds_sum", **of): 0.3,
        key("stage_queue_seconds_count", **of): 2,
        key("stage_waiting", **of): 1,
        key("stage_running", **of): 1,
        key("stage_batch_requests_bucket", le="2.0", **of): 0,
        key("stage_batch_requests_bucket", le="4.0", **of): 1,
        key("stage_batch_limit", **of): 4,
        key("stage_device_memory_bytes", **of): 1000,
        key("stage_host_memory_bytes", **of): 2000,
        key("stage_cache_lookups_total", result="hit", **of): 1,
        key("stage_cache_lookups_total", result="miss", **of): 0,
        key("stage_merged_requests_total", stage=0): 6,
        key("stage_credits_free", stage=1): 9,
        key("stage_prefix_cache_tokens_total", result="hit", **of): 30,
        key("stage_prefix_cache_tokens_total", result="miss", **of): 10,
        key("stage_encoder_cache_items_total", result="hit", **of): 3,
        key("stage_edge_messages_total", from_stage=0, to_stage=1): 2,
        key("stage_edge_bytes_total", from_stage=0, to_stage=1): 500,
        key("stage_edge_connector_seconds_total", from_stage=0, to_stage=1, side="put"): 0.03,
        key("stage_edge_connector_seconds_total", from_stage=0, to_stage=1, side="get"): 0.04,
        key("stage_edge_transfer_seconds_count", from_stage=0, to_stage=1): 1,
        key("stage_restarts_total", **of): 1,
        key("stage_redispatched_requests_total", **of): 2,
        key("stage_incidents_total", kind="died", **of): 1,
        key("stage_anomalies_total", kind="stuck_queue", stage=1): 1,
        key("stage_anomalies_total", kind="stuck_queue", stage=0): 0,
        key("stage_given_up_requests_total", reason="stalled", stage=1): 1,
        key("stage_given_up_requests_total", reason="waited", stage=1): 0,
        key("stage_arrivals_observed", modality="image"): 1.5,
        key("stage_arrivals_forecast", modality="image"): 2.5,
    }
    assert {name: page.get(name) for name in expected} == expected
    assert {name for name, _ in page} >= {metric.name for metric in STAGE_METRICS if metric.kind != "histogram"}


def test_what_is_not_known_is_not_told():
    board = StageBoard([0])
    board.submitted(0, 0, "a", 0.0)
    names = {name for name, _ in page_of(board)}
    assert names.isdisjoint({"stage_credits_free", "stage_batch_limit", "stage_device_memory_bytes"})
    assert names.isdisjoint({"stage_prefix_cache_tokens_total", "stage_encoder_cache_items_total"})
    assert names.isdisjoint({"stage_arrivals_forecast", "stage_edge_bytes_total"})


@pytest.mark.parametrize("metric", STAGE_METRICS, ids=lambda metric: metric.name)
def test_names_follow_the_rules(metric, board):
    assert re.fullmatch(r"stage_[a-z][a-z_]*", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert metric.help.endswith(".")
    told = list(samples(metric, board))
    assert told
    assert all(isinstance(value, Histogram) == (metric.kind == "histogram") for _, value in told)
    assert all(len(labels) == len(metric.labels) for labels, _ in told)
    if metric.values:
        assert {labels[-1] for labels, _ in told} == set(metric.values)


def test_no_name_is_taken_twice():
    names = [metric.full_name for metric in (*METRICS, *STAGE_METRICS)]
    assert len(names) == len(set(names))


def test_every_fact_is_published():
    published = {(metric.scope, metric.field) for metric in STAGE_METRICS}
    held = {(scope, field.name) for scope, facts in FACTS.items() for field in dataclasses.fields(facts)}
    assert held - published == {(Scope.REPLICA, "requests")}
