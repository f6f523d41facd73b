"""What connectors tell on /metrics."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from prometheus_client.parser import text_string_to_metric_families

from tests.omni.test_connectors import make
from tests.support.arena import place, small
from tests.support.host_device import device_path
from vllm_omni_sched.engine.metrics_bridge import EngineMetricsCollector
from vllm_omni_sched.omni.metrics import FACTS, ConnectorMetrics, metrics_of_this_process

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


def test_a_page_tells_which_device_tensors_stayed_and_why_others_did_not() -> None:
    connector, metrics = make("CudaIpcConnector"), ConnectorMetrics()
    metrics.add(connector)
    connector.path.close()
    with place() as root:
        connector._path = device_path(small(root), max_held_bytes=10_000)
        for key in ("a", "b", "c"):
            connector.put("0", "1", key, {"x": torch.zeros(1000)})
            connector.get("0", "1", key if key != "b" else "none")
        found = samples(metrics.page().decode())
        assert found["connector_device_tensors_total", "cuda_ipc"] == 2
        assert found["connector_device_bytes_total", "cuda_ipc"] == 8000
        assert found["connector_device_opened_total", "cuda_ipc"] == 1
        assert found["connector_device_held_bytes", "cuda_ipc"] == 4000
        assert found["connector_device_fallbacks_total", "cuda_ipc", "no_receiver"] == 1
        connector.close()


def test_a_connector_that_is_gone_is_not_told_about() -> None:
    connector, metrics = make("ArenaConnector"), ConnectorMetrics()
    metrics.add(connector)
    connector.close()
    del connector
    assert not [name for name, *_ in samples(metrics.page().decode()) if "messages" in name]


def test_times_are_counted_where_messages_get_through() -> None:
    connector = make("ArenaConnector")
    before = samples(metrics_of_this_process(1).page().decode())
    connector.put("0", "1", "a", {"x": 1})
    connector.get("0", "1", "none")
    connector.get("0", "1", "a")
    after = samples(metrics_of_this_process(1).page().decode())
    for name in ("connector_put_seconds_count", "connector_get_seconds_count"):
        assert after[(name,)] == before[(name,)] + 1
    connector.close()


def test_the_process_that_serves_metrics_shows_them_with_their_stage() -> None:
    connector = make("ArenaConnector")
    metrics_of_this_process(1)
    names = {family.name for family in EngineMetricsCollector().collect()}
    assert {f"vllm:omni_sched_{fact.name}" for fact in FACTS} <= names
    connector.close()
