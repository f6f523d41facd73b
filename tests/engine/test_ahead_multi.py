"""Encode-ahead beside a connector of the operator: who is asked first, what each half is told, what is offered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import ECTransferConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole

from tests.engine.combinations.operators import Wanted
from vllm_omni_sched import compat
from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.engine.ahead.host_messages import HostOrders
from vllm_omni_sched.engine.ahead.messages import AheadOrders, AheadReport
from vllm_omni_sched.engine.ahead.multi import EncodeAheadMultiConnector, MultiOrders
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


def test_an_engine_that_only_encodes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"this engine only encodes .* set ec_role to 'ec_both', or set it to false"):
        attach_encode_ahead(config("ec_producer"))


def test_a_config_that_names_no_connector_gets_ours_alone() -> None:
    made = config()
    made.ec_transfer_config = ECTransferConfig()
    attach_encode_ahead(made)
    assert made.ec_transfer_config.ec_connector == "EncodeAheadConnector"


def test_an_encoding_of_either_is_there(scheduler: Any) -> None:
    scheduler.operators.has, scheduler.planner.ready = {"a"}, {"b"}
    assert [scheduler.has_cache_item(one) for one in "abc"] == [True, True, False]


def test_orders_of_both_travel_together(scheduler: Any) -> None:
    orders = scheduler.build_connector_meta(None)
    assert isinstance(orders, AheadOrders)
    assert (orders.load, orders.share, orders.pending, orders.operators) == ({"made": "made"}, 0.5, True, Wanted(7))


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
