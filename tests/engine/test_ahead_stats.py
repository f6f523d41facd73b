"""What vLLM's own connector metrics get from encode-ahead, from the scheduler to the page."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tests.engine.harness.bench import Bench
from vllm_omni_sched import compat

pytestmark = pytest.mark.skipif(
    not compat.ec_connectors_have_stats(), reason="this vLLM collects no statistics of EC connectors"
)


def test_what_the_lane_did_reaches_the_page_once():
    from vllm_omni_sched.engine.ahead.connector import EncodeAheadConnector

    bench = Bench()
    bench.decode()
    bench.poisoned = {"bad"}
    bench.add("r1", 20, [(4, "good")])
    bench.add("r2", 20, [(4, "bad")])
    reports = []
    collect = bench.scheduler.ec_connector.get_ec_connector_stats
    bench.scheduler.ec_connector.get_ec_connector_stats = lambda: reports.append(collect()) or reports[-1]
    for _ in range(4):
        bench.step(finish=1)
    told = [report for report in reports if report is not None]
    assert [report.data for report in told] == [
        {"encode_seconds": [0.1], "failed": 0},
        {"encode_seconds": [], "failed": 1},
    ]

    registry = CollectorRegistry()
    types: dict[Any, Any] = {
        kind: lambda kind=kind, **options: kind(registry=registry, **options) for kind in (Counter, Gauge, Histogram)
    }
    prom = EncodeAheadConnector.build_prom_metrics(bench.scheduler.vllm_config, types, ["engine"], {0: ["0"]})
    total = EncodeAheadConnector.build_ec_connector_stats()
    assert total.is_empty()
    for report in told:
        prom.observe(report.data)
        total = total.aggregate(EncodeAheadConnector.build_ec_connector_stats(report.data))
    page = generate_latest(registry).decode()
    assert 'vllm:ec_encode_ahead_seconds_count{engine="0"} 1.0' in page
    assert 'vllm:ec_encode_ahead_failed_total{engine="0"} 1.0' in page
    assert total.reduce() == {"encoded": 1, "encode seconds (median)": 0.1, "failed": 1}
    total.reset()
    assert total.is_empty()
