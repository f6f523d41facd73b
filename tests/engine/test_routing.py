"""Routing by encodings, through vLLM's own choice of an engine core."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_omni_sched import compat
from vllm_omni_sched.config.errors import MissingSymbolError
from vllm_omni_sched.engine import routing
from vllm_omni_sched.engine.routing import ROUTE_METRICS, RouteMetrics, Router, attach_routing
from vllm_omni_sched.resource.engine.encoding_route import RouteReason

CLIENT = compat.find(compat.CORE_CLIENT, "DPLBAsyncMPClient")
ORIGINAL = CLIENT.get_core_engine_for_request
ENGINES = [b"\0\0", b"\1\0", b"\2\0"]


@pytest.fixture
def client() -> Any:
    """Return vLLM's client of three engine cores, without its sockets."""
    made = object.__new__(CLIENT)
    made.client_count, made.eng_start_index = 1, 0
    made.reqs_in_flight, made.streaming_reqs, made.engine_inflight = {}, set(), Counter()
    made.core_engines, made.lb_engines = list(ENGINES), [[0, 0, 0.0] for _ in ENGINES]
    return made


class Sent:
    """Requests that a router sends, and the reasons."""

    def __init__(self, client: Any, extra_requests: int = 2) -> None:
        self.client, self.reasons = client, list[RouteReason]()
        self.router = Router(extra_requests, self.reasons.append)

    def __call__(self, name: str, *items: str, rank: int | None = None, **how: Any) -> int:
        features = [SimpleNamespace(identifier=item, mm_position=SimpleNamespace(length=4)) for item in items]
        request = SimpleNamespace(
            **{
                "request_id": name,
                "mm_features": features,
                "data_parallel_rank": rank,
                "resumable": False,
                "pooling_params": None,
                **how,
            }
        )
        engine = self.router.engine_for(self.client, request, ORIGINAL)
        assert request.data_parallel_rank == rank
        assert self.client.reqs_in_flight[name] == engine
        return ENGINES.index(engine)


def test_a_request_goes_where_its_items_went_before(client: Any) -> None:
    send = Sent(client)
    first = [send(f"r{item}", item) for item in "abc"]
    assert sorted(first) == [0, 1, 2]  # vLLM's own choice
    assert [send(f"s{item}", item) for item in "cab"] == [first[2], first[0], first[1]]
    assert send("both", "a", "b", "c") in first
    assert Counter(send.reasons) == {RouteReason.UNKNOWN: 3, RouteReason.HELD: 4}


def test_an_engine_with_too_many_requests_is_not_preferred(client: Any) -> None:
    send = Sent(client)
    holder = send("r", "a")
    while send.reasons[-1] is not RouteReason.BUSY:
        last = send(f"r{len(send.reasons)}", "a")
        assert len(send.reasons) < 10
    assert last != holder
    assert send.reasons.count(RouteReason.HELD) == 2  # with the first one, two more than the others
    assert client.engine_inflight[ENGINES[holder]] == client.lb_engines[holder][0] == 3


def test_what_is_named_or_has_no_items_is_left_to_vllm(client: Any) -> None:
    send = Sent(client)
    assert send("named", "a", rank=2) == 2
    assert send("same", "a") == 2
    send("text")
    send("pooled", "a", pooling_params=SimpleNamespace(late_interaction_params=None))
    assert send.reasons == [RouteReason.NAMED, RouteReason.HELD, RouteReason.NO_ITEMS, RouteReason.NAMED]


def test_several_api_servers_send_an_item_to_the_same_engine(client: Any) -> None:
    client.client_count = 2
    first = [Sent(client, 100)(f"r{item}", item) for item in "abcdefgh"]
    client.engine_inflight.clear()
    client.lb_engines = [[0, 0, 0.0] for _ in ENGINES]
    other = Sent(client, 100)
    assert [other(f"s{item}", item) for item in "abcdefgh"] == first
    assert len(set(first)) > 1
    assert set(other.reasons) == {RouteReason.HOME}


def test_the_name_of_an_engine_is_taken_back_when_vllm_fails(client: Any) -> None:
    router = Router(2, lambda reason: None)
    features = [SimpleNamespace(identifier="a", mm_position=SimpleNamespace(length=4))]
    request = SimpleNamespace(request_id="r", mm_features=features, data_parallel_rank=None, pooling_params=None)

    def fails(*_: Any) -> Any:
        assert request.data_parallel_rank == 1
        raise RuntimeError("the engine is dead")

    router._sent.note(1, ["a"])
    with pytest.raises(RuntimeError, match="the engine is dead"):
        router.engine_for(client, request, fails)
    assert request.data_parallel_rank is None


def test_it_is_attached_to_servers_of_several_engines_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Client:
        def get_core_engine_for_request(self, request: Any) -> Any:
            return "vLLM's"

    monkeypatch.setattr(routing.compat, "find", lambda module, name: Client)
    stock = Client.get_core_engine_for_request
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_size=1), model_config=SimpleNamespace(is_multimodal_model=True)
    )
    attach_routing(config)
    assert Client.get_core_engine_for_request is stock
    config.parallel_config.data_parallel_size = 2
    attach_routing(config)
    attach_routing(config)
    assert Client.get_core_engine_for_request.__wrapped__ is stock  # type: ignore[attr-defined]
    client = Client()
    client.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(scheduler_cls=None))  # type: ignore[attr-defined]
    assert client.get_core_engine_for_request(None) == "vLLM's"  # another engine of this process, with their scheduler
    monkeypatch.setattr(routing.compat, "find", lambda module, name: None)
    with pytest.raises(MissingSymbolError, match="'route_by_encodings' cannot work"):
        attach_routing(config)


def test_routed_requests_are_counted_by_reason() -> None:
    metrics = RouteMetrics()
    metrics.routed(RouteReason.HELD)
    (family,) = metrics.collect()
    values = {one.labels["reason"]: one.value for one in family.samples if one.name.endswith("_total")}
    assert values == {**dict.fromkeys(ROUTE_METRICS[0].values, 0.0), "held": 1.0}
