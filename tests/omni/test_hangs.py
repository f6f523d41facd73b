"""A replica that is stopped in the middle of its work: all are answered once, and as before; and what stages report."""

from __future__ import annotations

from typing import Any

import pytest

from dev.omni_cpu.compare import first_difference
from dev.omni_cpu.spec import TEXT_TO_TEXT
from tests.omni.conftest import Ran
from tests.omni.connectors import REFERENCE
from tests.omni.harness.stage_scenarios import CROWD

pytestmark = pytest.mark.slow

OPTIONS = {
    "runtime": {"recovery": {"hang_seconds": 2.0}},
    "monitoring": {"anomaly": {"interval_seconds": 0.5, "max_stage_seconds": 5.0}},
}


@pytest.fixture(scope="module")
def found(ran: Ran) -> dict[str, Any]:
    outcome = ran(
        TEXT_TO_TEXT, "full_payload", REFERENCE, scheduling=OPTIONS, replicas=2, replicated=0, scenarios=("stopped",)
    )
    result: dict[str, Any] = outcome.results["scenarios"]["stopped"]
    return result


def test_all_are_answered_once_though_a_replica_hangs(found: dict[str, Any]):
    assert found["held"] > 1
    assert found["answers"].keys() == CROWD.keys()
    assert first_difference(found["before"], found["answers"]) is None
    assert all(set(answer["ends"].values()) == {1} for answer in found["answers"].values())


def total(found: dict[str, Any], metric: str, **labels: str) -> float:
    return sum(value for name, of, value in found["metrics"] if name == metric and labels.items() <= of.items())


def test_it_was_suspected_ended_and_started_again(found: dict[str, Any]):
    first = {"stage": "0", "replica": "0"}
    for kind in ("suspected", "died", "back"):
        assert total(found, "incidents_total", kind=kind, **first) == 1
    assert total(found, "anomalies_total", kind="silent_replica", stage="0") == 1
    lost = total(found, "requests_total", outcome="lost", **first)
    assert 0 < lost <= found["held"]  # outputs that the replica sent before it was stopped still arrive
    assert total(found, "redispatched_requests_total", **first) == lost
    for other in ({"stage": "0", "replica": "1"}, {"stage": "1", "replica": "0"}):
        assert total(found, "incidents_total", **other) == 0


def test_stages_report_what_only_they_know(found: dict[str, Any]):
    edge = {"from_stage": "0", "to_stage": "1"}
    assert total(found, "edge_messages_total", **edge) >= len(CROWD)
    assert total(found, "edge_bytes_total", **edge) > 100 * len(CROWD)
    for side in ("put", "get"):
        assert total(found, "edge_connector_seconds_total", side=side, **edge) > 0
    absent = {"device_memory_bytes", "prefix_cache_tokens_total", "encoder_cache_items_total"}
    assert absent.isdisjoint(name for name, _, _ in found["metrics"])  # no device, no prefix cache, no items: not 0
