"""What connectors tell on /metrics."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from prometheus_client.parser import text_string_to_metric_families

from tests.omni.test_connectors import OURS, make
from tests.support.arena import place, small
from tests.support.host_device import device_path
from vllm_omni_sched.clock import monotonic_seconds
from vllm_omni_sched.engine.metrics.bridge import EngineMetricsCollector
from vllm_omni_sched.logs import LOGGER
from vllm_omni_sched.omni.metrics import FACTS, TIMES, ConnectorMetrics, metrics_of_this_process

pytestmark = pytest.mark.omni


def samples(page: str) -> dict[tuple[str, ...], float]:
    return {
        (sample.name.removeprefix("vllm:omni_sched_"), *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def test_a_page_tells_messages_bytes_room_and_routes() -> None:
    connector, metrics = make("OmniAutoConnector"), ConnectorMetrics()
    metrics.add(connector)
    for key in ("a", "b"):
        connector.put("0", "1", key, {"x": torch.zeros(10)})
    connector.get("0", "1", "a")
    connector.cleanup("b")
    found = samples(metrics.page().decode())
    assert found["connector_messages_total", "arena"] == 2
    assert found["connector_inline_messages_total", "arena"] == 2
    assert found["connector_received_messages_total", "arena"] == 1
    assert found["connector_discarded_messages_total", "arena"] == 1
    assert found["connector_routed_messages_total", "0->1 arena only", "auto"] == 2
    assert found["connector_pool_capacity_bytes", "arena", "ring"] == 8 << 20
    assert found["connector_sent_bytes_total", "arena"] >= 80
    connector.close()


def test_a_page_tells_what_lies_in_which_tier(tmp_path: Path) -> None:
    pool = {"initial_bytes": 1 << 20, "max_bytes": 1 << 20}
    tiers = {"disk": {"directory": str(tmp_path)}}
    connector, metrics = make("OmniAutoConnector", arena={"image": pool}, tiers=tiers), ConnectorMetrics()
    metrics.add(connector)
    for i in range(8):
        assert connector.put("0", "1", f"{i}", {"x": torch.zeros(250, 256)})[0]
    found = samples(metrics.page().decode())
    assert found["connector_messages_total", "tiers"] == 8
    lying = [found["connector_tier_messages", tier, "tiers"] for tier in ("arena", "disk")]
    assert sum(lying) == 8
    assert lying[1] >= 4
    assert found["connector_tier_bytes", "disk", "tiers"] == lying[1] * found["connector_sent_bytes_total", "tiers"] / 8
    for i in range(8):
        payload, _ = connector.get_with_deadline("0", "1", f"{i}", deadline=monotonic_seconds() + 30)
        assert payload["x"].shape == (250, 256)
    connector.close()


def test_a_page_tells_which_device_tensors_stayed_and_why_others_did_not() -> None:
    connector, metrics = make("CudaIpcConnector"), ConnectorMetrics()
    metrics.add(connector)
    connector.transport.close()
    with place() as root:
        connector._transport = device_path(small(root), max_held_bytes=20_000)
        for key in ("a", "b", "c"):
            connector.put("0", "1", key, {"x": torch.zeros(2000)})
            connector.get("0", "1", key if key != "b" else "none")
        found = samples(metrics.page().decode())
        assert found["connector_device_tensors_total", "cuda_ipc"] == 2
        assert found["connector_device_bytes_total", "cuda_ipc"] == 16_000
        assert found["connector_device_opened_total", "cuda_ipc"] == 1
        assert found["connector_device_held_bytes", "cuda_ipc"] == 8000
        assert found["connector_device_fallbacks_total", "cuda_ipc", "no_receiver"] == 1
        connector.close()


def test_a_connector_that_is_gone_is_not_told_about() -> None:
    connector, metrics = make("ArenaConnector"), ConnectorMetrics()
    metrics.add(connector)
    connector.close()
    del connector
    assert not [name for name, *_ in samples(metrics.page().decode()) if "messages" in name]


def test_times_are_counted_where_messages_get_through_by_the_path_that_carried_them() -> None:
    connector, metrics = make("OmniAutoConnector"), ConnectorMetrics()
    metrics.add(connector)
    for key in "ab":
        connector.put("0", "1", key, {"x": 1})
    connector.get("0", "1", "none")
    connector.get("0", "1", "a")
    found = samples(metrics.page().decode())
    counted = {name: found[f"connector_{name}_seconds_count", "arena"] for name in TIMES}
    assert counted == {"put": 2, "get": 1, "transfer": 1}
    for name in TIMES:
        assert found[f"connector_{name}_seconds_bucket", "+Inf", "arena"] == counted[name]
        assert found[f"connector_{name}_seconds_bucket", "32.0", "arena"] == counted[name]
    seconds = connector.health()["seconds"]
    assert {name: one["count"] for name, one in seconds.items()} == {
        "put arena": 2,
        "get arena": 1,
        "transfer arena": 1,
    }
    assert set(seconds["get arena"]) == {"count", "p50", "p90", "p99"}
    connector.close()


@pytest.mark.parametrize("name", OURS)
def test_an_alarm_is_logged_once_counted_and_in_health_while_it_lasts(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    connector, metrics = make(name, leak_seconds=1e-9), ConnectorMetrics()
    metrics.add(connector)
    connector.put("0", "1", "a", {"x": 1})
    with caplog.at_level("WARNING", logger=LOGGER):
        for _ in range(3):
            health = connector.health()
    assert (health["status"], health["alarms"]) == ("degraded", {"0->1 unclaimed": 1})
    path = "cuda_ipc" if name == "CudaIpcConnector" else "arena"
    assert f"unclaimed on edge 0->1 ({path}): 1 messages" in health["reason"]
    assert len([record for record in caplog.records if "unclaimed" in record.message]) == 1
    found = samples(metrics.page().decode())
    assert found["connector_alarms_total", "0->1 unclaimed", connector.transport.name] == 1
    connector.get("0", "1", "a")
    assert connector.health()["status"] == "healthy"
    connector.close()


def test_the_process_that_serves_metrics_shows_them_with_their_stage() -> None:
    connector = make("ArenaConnector")
    metrics_of_this_process(1)
    names = {family.name for family in EngineMetricsCollector().collect()}
    assert {
        f"vllm:omni_sched_{name}" for name in (*(fact.name for fact in FACTS), *(n for n, _ in TIMES.values()))
    } <= names
    connector.close()
