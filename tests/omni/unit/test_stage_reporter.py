"""What only the process of a stage knows is counted there, and reaches the board of the front end."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm_omni.distributed.omni_connectors.connectors.shm_connector import SharedMemoryConnector
from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory
from vllm_omni.engine.async_omni_engine import AsyncOmniEngine

from vllm_omni_sched.engine.metrics.files import EngineDirectory
from vllm_omni_sched.monitor.stage_board import StageBoard
from vllm_omni_sched.omni.stages.reports import stage_reporter as stage
from vllm_omni_sched.omni.stages.reports.report_reader import Moved, ReportReader
from vllm_omni_sched.omni.stages.reports.stage_reporter import StageReporter
from vllm_omni_sched.omni.stages.start import hooks

pytestmark = pytest.mark.omni


class Kept:
    """A connector that keeps messages in a dict; None is refused."""

    def __init__(self) -> None:
        self.lying: dict[str, Any] = {}

    def put(self, from_stage: str, to_stage: str, put_key: str, data: Any) -> tuple[bool, int, None]:
        if data is None:
            return False, 0, None
        self.lying[put_key] = data
        return True, len(data), None

    def get(self, from_stage: str, to_stage: str, get_key: str, metadata: Any = None) -> tuple[Any, int] | None:
        data = self.lying.pop(get_key, None)
        return None if data is None else (data, len(data))

    def get_with_deadline(
        self, from_stage: str, to_stage: str, get_key: str, metadata: Any = None, *, deadline: float
    ) -> tuple[Any, int] | None:
        return self.get(from_stage, to_stage, get_key, metadata)


def page(report: StageReporter) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(report.page())
    return found


def test_a_connector_counts_what_it_moves_and_is_what_it_was() -> None:
    report, connector = StageReporter(), Kept()
    connector.__class__ = stage.counting(Kept, report)
    assert isinstance(connector, Kept)
    assert type(connector).__name__ == "Kept"
    assert connector.put("0", "1", "a", b"1234") == (True, 4, None)
    connector.put("0", "1", "b", b"56")
    assert connector.put("0", "1", "c", None) == (False, 0, None)
    assert connector.get("0", "1", "a", {}) == (b"1234", 4)
    assert connector.get("0", "1", "a") is None
    edges = page(report)["edges"]
    assert {name: sums[:2] for name, sums in edges.items()} == {"0>1 put": [2, 6], "0>1 get": [1, 4]}
    assert all(sums[2] > 0 for sums in edges.values())


def failures(report: StageReporter) -> dict[str, float]:
    return {name: sums[3] for name, sums in page(report)["edges"].items()}


def test_a_put_that_is_refused_has_failed_and_a_look_that_finds_nothing_has_not() -> None:
    report, connector = StageReporter(), Kept()
    connector.__class__ = stage.counting(Kept, report)
    connector.put("0", "1", "a", b"12")
    for _ in range(2):
        connector.put("0", "1", "b", None)
        assert connector.get("0", "1", "b") is None
    connector.get("0", "1", "a")
    assert failures(report) == {"0>1 put": 2, "0>1 get": 0}


def test_a_report_names_its_process_and_those_it_descends_from() -> None:
    found = page(StageReporter())
    assert found["processes"][0].startswith(f"{os.getpid()}@")
    assert len(found["processes"]) > 1


def test_device_memory_is_that_of_torch_and_absent_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(is_initialized=lambda: True, memory_reserved=lambda i: 10 + i, device_count=lambda: 2)
    torch = SimpleNamespace(accelerator=SimpleNamespace(is_available=lambda: True), get_device_module=lambda: device)
    monkeypatch.setitem(stage.sys.modules, "torch", torch)
    assert stage.device_bytes() == 21
    device.is_initialized = lambda: False
    assert stage.device_bytes() is None
    torch.accelerator.is_available = lambda: False
    assert stage.device_bytes() is None


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What `begin` wraps is as it was afterwards."""
    for owner, name in (
        (OmniConnectorFactory, "create_connector"),
        (KVCacheManager, "get_computed_blocks"),
        (EncoderCacheManager, "check_and_update_cache"),
        (AsyncOmniEngine, "_initialize_stages"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name) if name == "_initialize_stages" else owner.__dict__[name])
    stage.start_reporting.cache_clear()
    yield
    stage.start_reporting.cache_clear()


def begun(monkeypatch: pytest.MonkeyPatch, base: Path) -> StageReporter:
    monkeypatch.setenv(stage.VARIABLE, "1")
    monkeypatch.setattr(stage, "reports_base", lambda: base)
    monkeypatch.setattr(stage.PagePublisher, "start", lambda self: None)
    report = stage.start_reporting()
    assert report is not None
    return report


def test_the_process_of_a_stage_counts_in_vllms_own_caches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, untouched: None
) -> None:
    report = begun(monkeypatch, tmp_path)
    request = SimpleNamespace(request_id="a", mm_features=[SimpleNamespace(identifier="x")], num_tokens=48)
    caches = EncoderCacheManager(8)
    assert caches.check_and_update_cache(request, 0) is False
    caches.cached["x"] = {"b"}
    assert caches.check_and_update_cache(SimpleNamespace(**vars(request) | {"request_id": "c"}), 0) is True
    blocks = SimpleNamespace(
        prefix_cache_lookup_enabled=lambda request: True,
        coordinator=SimpleNamespace(find_longest_cache_hit=lambda hashes, most: ((), 32, 0)),
        enable_kv_cache_events=False,
        create_kv_cache_blocks=lambda found: found,
    )
    request.block_hashes = []
    assert KVCacheManager.get_computed_blocks(blocks, request)[1] == 32
    assert page(report)["caches"] == {"encoder": [1, 2], "prefix": [32, 48]}


def test_connectors_that_it_makes_are_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, untouched: None) -> None:
    report = begun(monkeypatch, tmp_path)
    connector = OmniConnectorFactory.create_connector(SimpleNamespace(name="SharedMemoryConnector", extra={}))
    assert isinstance(connector, SharedMemoryConnector)
    key = f"report-{os.getpid()}"
    _, size, metadata = connector.put("0", "1", key, {"x": 1})
    connector.get("0", "1", key, metadata)
    assert page(report)["edges"]["0>1 put"][:2] == [1, size]
    assert page(report)["edges"]["0>1 get"][:2] == [1, size]


@pytest.mark.parametrize("asked_itself", [False, True])
def test_a_process_that_nobody_else_has_asked_does_nothing(
    monkeypatch: pytest.MonkeyPatch, untouched: None, asked_itself: bool
) -> None:
    monkeypatch.delenv(stage.VARIABLE, raising=False)
    if asked_itself:
        monkeypatch.setenv(stage.VARIABLE, str(os.getpid()))
    before = KVCacheManager.__dict__["get_computed_blocks"]
    assert stage.start_reporting() is None
    assert KVCacheManager.__dict__["get_computed_blocks"] is before


@pytest.mark.parametrize(
    ("options", "asks"),
    [
        ("omni_sched: {}", True),
        ("omni_sched: {monitoring: {enabled: false}}", False),
        ("", False),
    ],
)
def test_stages_are_asked_where_there_are_options(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: str, asks: bool
) -> None:
    monkeypatch.setattr(stage.os, "environ", {stage.VARIABLE: "7"})
    (deploy := tmp_path / "deploy.yaml").write_text(f"stages: []\n{options}\n")
    seen: list[str | None] = []
    start = hooks._initialize_stages(lambda engine, timeout: seen.append(stage.os.environ.get(stage.VARIABLE)))
    start(SimpleNamespace(config_path=str(deploy)), 5)
    assert seen == [str(os.getpid()) if asks else None]


def told(base: Path, board: StageBoard, *rounds: dict[str, Any], owner: int | None = None) -> list[list[Moved]]:
    """A process of replica 1 of stage 0 reports so."""
    reader, moved = ReportReader(board, base), []
    directory = EngineDirectory.create("report", {}, base)
    try:
        for one in rounds:
            body: dict[str, Any] = {
                "processes": ["77@5", f"{owner or os.getpid()}@1"],
                "edges": {},
                "caches": {},
                "device_bytes": None,
            }
            directory.write(json.dumps(body | one).encode())
            moved.append(reader.read({(0, 1): [os.getpid()]}))
    finally:
        directory.close()
    return moved


def test_the_board_gets_what_is_new_in_each_report(tmp_path: Path) -> None:
    board = StageBoard([0, 1])
    first = {"edges": {"0>1 put": [2, 600, 0.5, 0], "0>1 get": [1, 300, 0.25, 0]}, "caches": {"prefix": [30, 40]}}
    second = {"edges": {"0>1 put": [3, 700, 0.75, 0]}, "caches": {"prefix": [30, 60]}, "device_bytes": 9}
    told(tmp_path / "base", board, first, second, second)
    facts, edge = board.replicas[0, 1], board.edges[0, 1]
    assert (edge.messages, edge.nbytes, edge.connector_seconds) == (3, 700, {"put": 0.75, "get": 0.25})
    assert facts.prefix_tokens == {"hit": 30, "miss": 30}
    assert facts.encoder_items == {}
    assert (facts.device_bytes, facts.host_bytes) == (9, None)


def test_what_failed_at_an_edge_is_told_though_nothing_moved(tmp_path: Path) -> None:
    board = StageBoard([0, 1])
    first = {"edges": {"0>1 put": [2, 600, 0.5, 1]}}
    second = {"edges": {"0>1 put": [2, 600, 0.5, 4]}}
    moved = told(tmp_path / "base", board, first, second, second)
    assert moved == [[Moved((0, 1), 0, 1, "put", 2, 600, 0.5, 1)], [Moved((0, 1), 0, 1, "put", 0, 0, 0.0, 3)], []]
    assert board.edges[0, 1].messages == 2


@pytest.mark.parametrize("edges", [{"prefill>1 put": [1, 2, 0.5, 1]}, {"0>7 put": [1, 2, 0.5, 1]}])
def test_edges_that_the_graph_does_not_have_are_left_out(tmp_path: Path, edges: dict[str, Any]) -> None:
    board = StageBoard([0, 1])
    assert told(tmp_path / "base", board, {"edges": edges}) == [[]]
    assert board.edges == {}


def test_reports_of_others_and_damaged_ones_are_left_out(tmp_path: Path) -> None:
    board = StageBoard([0, 1])
    told(tmp_path / "base", board, {"caches": {"prefix": [1, 2]}}, owner=5)
    told(tmp_path / "base", board, {"processes": []})
    assert board.replicas == {}
