"""What `top` reads of a server: sums over engines, changes between reads, quantiles, restarts."""

from __future__ import annotations

import pytest

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.monitor.counts import SchedulerMetrics
from vllm_omni_sched.monitor.exposition import render
from vllm_omni_sched.monitor.server_frame import frame_of
from vllm_omni_sched.monitor.server_page import ServerPage, read_page

VLLM = """
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 4.0
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="deferred"} 0.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.1
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{generation="0"} 7.0
"""


def metrics(times: int = 1) -> SchedulerMetrics:
    """Return what an engine has counted after so many equal rounds."""
    counts = SchedulerMetrics()
    for _ in range(times):
        counts.steps += 100
        counts.encoder_cache_hits += 3
        counts.encoder_cache_misses += 1
        counts.encoder_tier_lane += 2
        counts.ahead_encoded += 2
        counts.ahead_seconds += 5.0
        counts.placements["would_stall_decode"] += 2
        counts.placements["no_decode"] += 1
        counts.admitted["deadline"] += 4
        counts.slo_met["interactive"] += 9
        counts.slo_missed["interactive"] += 1
        for seconds in (0.02, 0.02, 0.02, 0.3):
            counts.ttft_seconds["interactive"].observe(seconds)
            counts.ahead_wait_seconds.observe(seconds)
    counts.waiting_requests = {"realtime": 0, "interactive": 1, "batch": 3}
    counts.ahead_pending = 5
    counts.lane_share = 0.25
    return counts


def page(counts: SchedulerMetrics | None = None, at: float = 0.0) -> ServerPage:
    return read_page(VLLM + render(metrics() if counts is None else counts).decode(), at)


def test_samples_are_summed_over_engines_and_fractions_are_averaged():
    frame = frame_of(page())
    assert (frame.requests.running, frame.requests.waiting) == (5, 4)
    assert frame.requests.waiting_by_reason == {"capacity": 4}
    assert frame.requests.kv_cache_usage == pytest.approx(0.3)


def test_the_metrics_of_others_are_left_out():
    assert all(name.startswith("vllm:") for name in page().samples)


def test_a_server_that_has_started_again_is_counted_from_its_start():
    frame = frame_of(page(metrics(1), at=20.0), page(metrics(3), at=10.0))
    assert (frame.seconds, frame.steps) == (None, 100)


def test_quantiles_are_interpolated_in_their_bucket():
    frame = frame_of(page())
    # three of four values lie between 10 and 25 ms, one between 250 and 500
    assert frame.lanes.wait_p50_seconds == pytest.approx(0.01 + 0.015 * 2 / 3)
    assert frame.slo["interactive"].ttft_p99_seconds == pytest.approx(0.25 + 0.25 * 0.96)


def test_stages_are_listed_by_replica():
    text = """
# TYPE vllm:omni_sched_stage_running gauge
vllm:omni_sched_stage_running{stage="1",replica="0"} 2.0
vllm:omni_sched_stage_running{stage="0",replica="0"} 1.0
# TYPE vllm:omni_sched_stage_requests_total counter
vllm:omni_sched_stage_requests_total{stage="0",replica="0",outcome="finished"} 7.0
vllm:omni_sched_stage_requests_total{stage="0",replica="0",outcome="lost"} 1.0
vllm:omni_sched_stage_requests_total{stage="0",replica="0",outcome="failed"} 2.0
"""
    found = [
        (one.stage, one.replica, one.running, one.finished, one.failed) for one in frame_of(read_page(text, 0)).stages
    ]
    assert found == [("0", "0", 1, 7, 3), ("1", "0", 2, 0, 0)]


def test_what_is_no_page_of_metrics_is_an_error():
    with pytest.raises(ConfigError, match="not a page of metrics in the Prometheus text format"):
        read_page("<html>vllm:x{</html> nothing", 0.0)
    assert not read_page("", 0.0).has_ours
    assert not read_page(VLLM, 0.0).has_ours
    assert page().has_ours
