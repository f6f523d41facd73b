"""Encode-ahead beside a connector of the operator: who is asked first, what each half is told, what is offered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import ECTransferConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.v1.outputs import ECConnectorOutput

from tests.engine.combinations.operators import Operators, Stored, Wanted
from vllm_omni_sched import compat
from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.engine.ahead.connector import EncodeAheadConnector
from vllm_omni_sched.engine.ahead.halves import planner_half
from vllm_omni_sched.engine.ahead.host_messages import HostOrders
from vllm_omni_sched.engine.ahead.messages import AheadOrders, AheadReport
from vllm_omni_sched.engine.ahead.multi import EncodeAheadMultiConnector, MultiOrders, MultiReport
from vllm_omni_sched.engine.fitted import lane_facts
from vllm_omni_sched.engine.start import attach_encode_ahead
from vllm_omni_sched.testing.config import make_vllm_config

pytestmark = pytest.mark.skipif(
    not compat.ec_connectors_hold_back(), reason="connectors of this vLLM cannot hold requests back"
)


def named(role: str = "ec_both") -> ECTransferConfig:
    return ECTransferConfig(
        ec_connector="Operators",
        ec_role=role,
        ec_connector_module_path="tests.engine.combinations.operators",
        ec_connector_extra_config={"where": "there"},
    )


def config(role: str = "ec_both") -> Any:
    made = make_vllm_config()
    made.additional_config = {"omni_sched": {"encode_ahead": True}}
    made.ec_transfer_config = named(role)
    return made


def connector(role: ECConnectorRole, transfer_role: str = "ec_both") -> Any:
    attach_encode_ahead(made := config(transfer_role))
    return EncodeAheadMultiConnector(made, role)


def request(*identifiers: str, request_id: str = "r") -> Any:
    features = [SimpleNamespace(identifier=one) for one in identifiers]
    return SimpleNamespace(request_id=request_id, mm_features=features, get_num_encoder_embeds=lambda index: 1)


class Planner:
    """Stands for the scheduler's half of the lane."""

    has_orders = has_news = False

    def __init__(self) -> None:
        self.ready: set[str] = set()
        self.runs = True
        self.asked: list[Any] = []
        self.failed: set[str] = set()

    def is_ready(self, identifier: str) -> bool:
        return identifier in self.ready

    def may_run(self, request: Any, num_computed_tokens: int) -> bool:
        self.asked.append("may_run")
        return self.runs

    @property
    def host(self) -> Any:
        return SimpleNamespace(allocated=lambda feature, embeds: self.asked.append(("cached", feature.identifier)))

    def allocated(self, request: Any, index: int) -> None:
        self.asked.append(("allocated", index))

    def take_failed(self) -> set[str]:
        return self.failed

    def take_orders(self, output: Any) -> AheadOrders:
        return AheadOrders(load={"made": "made"}, share=0.5, pending=True)

    def take_report(self, report: AheadReport) -> None:
        self.asked.append(report)


@pytest.fixture
def scheduler() -> Any:
    made = connector(ECConnectorRole.SCHEDULER)
    made.planner = Planner()
    return made


class LaneWorker:
    """Stands for the workers' half of the lane: puts what is ordered into the encoder cache."""

    def __init__(self) -> None:
        self.reported: AheadReport | None = None
        self.seen: list[str] = []
        self.closed = False

    def carry_out(self, orders: AheadOrders, encoder_cache: dict[str, Any]) -> None:
        self.seen = sorted(encoder_cache)
        for mm_hash in (*orders.load.values(), *orders.host.restore):
            encoder_cache[mm_hash] = f"embeddings of {mm_hash}"

    def report(self) -> AheadReport | None:
        return self.reported

    def close(self) -> None:
        self.closed = True


def worker(transfer_role: str = "ec_both") -> Any:
    made = connector(ECConnectorRole.WORKER, transfer_role)
    made.worker = LaneWorker()
    return made


def test_ours_takes_the_place_of_the_operators_and_keeps_its_config_as_it_was_given() -> None:
    made = config("ec_consumer")
    given = made.ec_transfer_config
    before = dict(vars(given))
    for _ in range(2):  # a config may be checked twice
        attach_encode_ahead(made)
        ours = made.ec_transfer_config
        assert ours.ec_connector == "EncodeAheadMultiConnector"
        assert (ours.ec_role, ours.engine_id) == ("ec_consumer", given.engine_id)
        assert ours.get_from_extra_config("where", None) == "there"
        assert not lane_facts(made).encodes_only
    half = EncodeAheadMultiConnector(made, ECConnectorRole.SCHEDULER)
    assert half.operators.config is given
    assert vars(given) == before
    assert planner_half(SimpleNamespace(ec_connector=half)) is half.planner


def test_an_engine_that_only_encodes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"this engine only encodes .* set ec_role to 'ec_both', or set it to false"):
        attach_encode_ahead(config("ec_producer"))


def test_a_config_that_names_no_connector_gets_ours_alone() -> None:
    made = config()
    made.ec_transfer_config = ECTransferConfig()
    attach_encode_ahead(made)
    assert made.ec_transfer_config.ec_connector == "EncodeAheadConnector"


@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.parametrize("operators", [None, named()])
def test_workers_know_of_other_engines_that_vllm_hides_from_theirs(operators: Any, engines: int) -> None:
    made = config()
    made.ec_transfer_config = operators
    made.parallel_config.data_parallel_size = engines
    attach_encode_ahead(made)
    made.parallel_config.data_parallel_size = 1  # as each engine of a model without experts sees it
    kind = EncodeAheadConnector if operators is None else EncodeAheadMultiConnector
    assert kind(made, ECConnectorRole.WORKER).worker.alone is (engines == 1)


def test_an_encoding_of_either_is_there(scheduler: Any) -> None:
    scheduler.operators.has, scheduler.planner.ready = {"a"}, {"b"}
    assert [scheduler.has_cache_item(one) for one in "abc"] == [True, True, False]


@pytest.mark.parametrize(
    ("holds_back", "runs", "available", "asked"),
    [(True, True, False, []), (False, True, True, ["may_run"]), (False, False, False, ["may_run"])],
)
def test_the_lane_is_asked_when_the_operators_does_not_hold_the_request_back(
    scheduler: Any, holds_back: bool, runs: bool, available: bool, asked: list[str]
) -> None:
    scheduler.operators.holds_back, scheduler.planner.runs = holds_back, runs
    assert scheduler.ensure_cache_available(request("a"), 3) is available
    assert scheduler.operators.asked == [("ensure", "r", 3)]
    assert scheduler.planner.asked == asked


def test_what_the_operators_has_is_not_taken_from_the_lane(scheduler: Any) -> None:
    scheduler.operators.has = {"a"}
    scheduler.planner.ready = {"a", "b"}
    for index in (0, 1):
        scheduler.update_state_after_alloc(request("a", "b"), index)
    assert scheduler.operators.asked == [("alloc", "r", 0), ("alloc", "r", 1)]
    assert scheduler.planner.asked == [("cached", "a"), ("allocated", 1)]


def test_the_operators_is_told_of_frees_and_ends_and_may_keep_the_engine_going(scheduler: Any) -> None:
    scheduler.update_state_after_free(request("a"), 0)
    assert scheduler.operators.asked == [("free", "r", 0)]
    assert scheduler.request_finished(request("a")) == (True, {"sent": "r"})
    assert not scheduler.has_pending_push_work()
    scheduler.operators.pending = True
    assert scheduler.has_pending_push_work()
    scheduler.operators.unavailable, scheduler.planner.failed = {"x"}, {"y"}
    assert scheduler.take_unavailable_requests() == {"x", "y"}


def test_orders_of_both_travel_together(scheduler: Any) -> None:
    orders = scheduler.build_connector_meta(None)
    assert isinstance(orders, AheadOrders)
    assert (orders.load, orders.share, orders.pending, orders.operators) == ({"made": "made"}, 0.5, True, Wanted(7))


def test_each_gets_its_own_report(scheduler: Any) -> None:
    lane = AheadReport(restarts=1)
    sent = ECConnectorOutput(finished_sending={"r"}, ec_connector_worker_meta=MultiReport(lane, Stored(2)))
    scheduler.update_connector_output(sent)
    assert scheduler.planner.asked == [lane]
    (output,) = scheduler.operators.outputs
    assert (output.finished_sending, output.ec_connector_worker_meta) == ({"r"}, Stored(2))
    scheduler.update_connector_output(ECConnectorOutput())
    assert scheduler.operators.outputs[1].ec_connector_worker_meta is None
    assert scheduler.planner.asked == [lane]


@pytest.mark.parametrize(("role", "saved"), [("ec_both", True), ("ec_consumer", False)])
def test_what_the_lane_made_is_offered_to_an_operators_connector_that_stores(role: str, saved: bool) -> None:
    half, cache = worker(role), {"old": "there before"}
    orders = MultiOrders(load={"made": "made"}, host=HostOrders(restore=("kept",)), operators=Wanted(7))
    half.bind_connector_metadata(orders)
    half.start_load_caches(cache)
    assert half.worker.seen == ["old", "theirs"]  # the operator's was first
    offered = [("save", "made", "embeddings of made"), ("save", "kept", "embeddings of kept")]
    assert half.operators.asked == [("load", 7), *(offered if saved else [])]
    half.save_caches(cache, "old")
    assert half.operators.asked[-1] == ("save", "old", "there before")
    half.clear_connector_metadata()
    with pytest.raises(AssertionError):
        half.operators._get_connector_metadata()


def test_the_workers_half_passes_on_what_the_lane_does_not_need() -> None:
    half = worker()
    half.register_caches({"a": 1})
    half.start_worker_services()
    half.start_save_caches(encoder_cache={})
    assert half.get_finished({"r"}) == ({"r"}, None)
    half.shutdown()
    assert half.operators.asked == [("register", ["a"]), "services", ("start_save", ["encoder_cache"]), "shutdown"]
    assert half.worker.closed


def test_reports_of_a_worker_are_sent_if_either_has_one_and_merge() -> None:
    half = worker()
    assert half.build_connector_worker_meta() is None
    half.operators.report = Stored(1)
    first = half.build_connector_worker_meta()
    assert first == MultiReport(None, Stored(1))
    half.operators.report, half.worker.reported = None, AheadReport(restarts=2)
    second = half.build_connector_worker_meta()
    both = first.aggregate(second)
    assert (both.lane.restarts, both.operators) == (2, Stored(1))
    assert both.aggregate(first).operators == Stored(2)


def test_what_vllm_measures_reaches_the_operators_config() -> None:
    attach_encode_ahead(made := config())
    made.ec_transfer_config.mm_encoder_output_widths = {"image": 12}  # vLLM 0.33 writes it, older ones do not
    half = EncodeAheadMultiConnector(made, ECConnectorRole.SCHEDULER)
    assert half.operators.config.mm_encoder_output_widths == {"image": 12}


@pytest.mark.skipif(not compat.ec_connectors_have_stats(), reason="this vLLM collects no statistics of EC connectors")
def test_statistics_of_both_reach_the_log_and_the_page(monkeypatch: pytest.MonkeyPatch, scheduler: Any) -> None:
    from tests.engine.combinations.operators_stats import KeepsCount, OperatorsStats

    monkeypatch.setattr(Operators, "get_ec_connector_stats", lambda self: OperatorsStats(data={"stored": 2}))
    monkeypatch.setattr(
        Operators, "build_ec_connector_stats", classmethod(lambda cls, data=None: OperatorsStats(data=data or {}))
    )
    pages: list[KeepsCount] = []
    monkeypatch.setattr(
        Operators, "build_prom_metrics", classmethod(lambda cls, *_: pages.append(KeepsCount()) or pages[-1])
    )
    first = scheduler.get_ec_connector_stats()
    scheduler.planner.has_news = True
    scheduler.planner.take_news = lambda: ([0.5], 1)
    both = first.aggregate(scheduler.get_ec_connector_stats())
    read = EncodeAheadMultiConnector.build_ec_connector_stats(dict(both.data))
    assert not read.is_empty()
    assert read.reduce() == {"encoded": 1, "encode seconds (median)": 0.5, "failed": 1, "stored": 4}
    read.reset()
    assert read.is_empty()
    assert EncodeAheadMultiConnector.build_ec_connector_stats().is_empty()

    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

    registry = CollectorRegistry()
    types: dict[Any, Any] = {
        kind: lambda kind=kind, **options: kind(registry=registry, **options) for kind in (Counter, Gauge, Histogram)
    }
    attach_encode_ahead(made := config())
    prom = EncodeAheadMultiConnector.build_prom_metrics(made, types, ["engine"], {0: ["0"]})
    prom.observe(first.data)
    prom.observe(both.data)
    assert pages[0].seen == [{"stored": 2}, {"stored": 4}]
    assert 'vllm:ec_encode_ahead_failed_total{engine="0"} 1.0' in generate_latest(registry).decode()
