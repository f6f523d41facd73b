"""Rules of the scheduler half of shared encodings, with the real store and a clock that the test moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.encoding_check import Encodings
from vllm_omni_sched.connectors.between_hosts import BetweenHosts, SharedItem, StoreCounts
from vllm_omni_sched.connectors.encodings import ClaimOutcome, EncodingStore
from vllm_omni_sched.engine.shared.planner import SharedCounts, SharedPlanner
from vllm_omni_sched.monitor.counts import SchedulerMetrics

WINDOW, WAIT, ANSWER = 20, 10.0, 0.5


class Engine:
    """One engine's planner, with the worker's part of the store.

    Args:
        folder: of the store of its host.
        far: folder of the store between hosts, if there is one; `carry` moves encodings.
    """

    def __init__(self, folder: Path, *, reports_of_all: bool = True, far: Path | None = None) -> None:
        self.now, self.pauses = 0.0, list[float]()
        self.check = Encodings()
        self.far = None if far is None else EncodingStore(str(far), "far", max_bytes=1000, ttl_seconds=60.0)
        self.store = EncodingStore(str(folder), "space", max_bytes=1000, ttl_seconds=60.0)
        self.planner = SharedPlanner(
            self.store,
            WINDOW,
            WAIT,
            reports_of_all=reports_of_all,
            clock=lambda: self.now,
            pause=self.pauses.append,
            between_hosts=None if self.far is None else self._way(self.far),
        )

    def _way(self, far: EncodingStore) -> BetweenHosts:
        self.way = BetweenHosts(
            self.store,
            lambda: far,
            self.check,
            answer_seconds=ANSWER,
            wait_seconds=WAIT,
            clock=lambda: self.now,
            threaded=False,
        )
        self.way.work()
        return self.way

    def carry(self) -> None:
        """Do what the thread between the stores would do, until there is nothing left."""
        while self.way.work() == 0.0:
            pass

    def step(self, **scheduled: int) -> tuple[str, ...]:
        return self.planner.take_orders(scheduled)[0]

    def encode(self, *keys: str) -> None:
        """Make room for these items, encode them in a step, and put them into the store."""
        for key in keys:
            assert not self.planner.has(key)
            self.planner.allocated(key)
        self.step(r=WINDOW)
        for key in keys:
            self.planner.carried_out(0, [(key, self.store.put(key, key.encode()).value)])


@dataclass
class Request:
    request_id: str
    mm_features: list[Any] = field(default_factory=list)
    num_computed_tokens: int = 0

    def get_num_encoder_embeds(self, input_id: int) -> int:
        return int(self.mm_features[input_id].mm_position.length)


def request(name: str, *keys: str, every: int = 5) -> Request:
    """Return a request with an item of four tokens every five tokens."""
    return Request(
        name,
        [
            SimpleNamespace(
                identifier=key, modality="image", mm_position=SimpleNamespace(offset=every * number, length=4)
            )
            for number, key in enumerate(keys)
        ],
    )


Start = Callable[..., Engine]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    engines = []

    def make(host: str = ".", **how: Any) -> Engine:
        folder = tmp_path / host
        folder.mkdir(exist_ok=True)
        engines.append(Engine(folder, **how))
        return engines[-1]

    yield make
    for engine in engines:
        engine.planner.close()


def test_what_another_engine_has_made_is_loaded_and_pinned_until_the_workers_have_read_it(start: Start) -> None:
    one, other = start(), start()
    assert one.planner.may_run(request("r", "a"), 0)
    one.encode("a")
    assert other.planner.may_run(request("s", "a"), 0)
    assert other.planner.has("a")
    other.planner.allocated("a")
    assert other.step(s=5) == ("a",)
    assert other.step(s=1) == ()
    assert other.store.read("a") == b"a"
    other.planner.carried_out(1, [])
    with pytest.raises(KeyError):
        other.store.read("a")
    assert (one.planner.counts, other.planner.counts) == (SharedCounts(made=1), SharedCounts(loaded=1))


def test_a_pin_lasts_where_reports_are_of_one_worker_only(start: Start) -> None:
    one = start(reports_of_all=False)
    one.store.put("a", b"1")
    one.planner.has("a")
    one.planner.allocated("a")
    one.step(s=5)
    one.planner.carried_out(1, [])
    assert one.store.read("a") == b"1"
    one.now = 31.0
    one.planner.carried_out(1, [])
    with pytest.raises(KeyError):
        one.store.read("a")


def test_a_pin_that_the_encoder_cache_has_no_room_for_ends_with_the_step(start: Start) -> None:
    one = start()
    one.store.put("a", b"1")
    assert one.planner.has("a")
    one.step(s=5)
    with pytest.raises(KeyError):
        one.store.read("a")


def test_a_request_waits_for_an_item_that_another_engine_makes(start: Start) -> None:
    one, other = start(), start()
    assert one.planner.may_run(request("r", "a"), 0)
    assert not other.planner.may_run(request("s", "b", "a"), 0)
    assert other.planner.may_run(request("t", "b"), 0)  # the request that waits holds no claim
    assert other.step() == ()
    assert other.pauses == [0.002]
    assert not other.planner.may_run(request("s", "b", "a"), 0)
    other.step(t=5)
    assert other.pauses == [0.002]  # something was computed
    one.encode("a")
    assert other.planner.may_run(request("s", "b", "a"), 0)
    assert other.planner.counts.awaited == 1


def test_a_request_waits_for_a_bounded_time(start: Start) -> None:
    one, other = start(), start()
    one.planner.may_run(request("r", "a"), 0)
    assert not other.planner.may_run(request("s", "a"), 0)
    other.now = WAIT
    assert other.planner.may_run(request("s", "a"), 0)
    assert other.planner.may_run(request("s", "a"), 0)
    assert other.planner.counts == SharedCounts(awaited=1, gave_up=1)
    assert not other.planner.may_run(request("t", "a"), 0)  # each request by itself


def test_only_the_items_of_the_next_step_matter(start: Start) -> None:
    one, other = start(), start()
    keys = [f"i{number}" for number in range(8)]  # the window of a step has the first four, then the next ones
    assert one.planner.may_run(request("r", *keys), 0)
    assert other.store.claim(keys[4:]) is ClaimOutcome.OURS
    assert other.store.claim(keys[3:4]) is ClaimOutcome.OTHERS
    assert not one.planner.may_run(request("r", *keys), 4)
    assert one.planner.may_run(request("r", *keys), 39)


def test_a_claim_ends_when_the_step_has_passed_the_item_without_an_encode(start: Start) -> None:
    one, other = start(), start()
    asked = request("r", "a", "b", "c", "d")
    one.planner.may_run(asked, 0)
    one.step(r=6)  # computed tokens of a and b, which were in its own encoder cache
    assert other.store.claim(["a", "b"]) is ClaimOutcome.OURS
    assert other.store.claim(["c"]) is ClaimOutcome.OTHERS
    one.planner.finished(asked)
    assert other.store.claim(["c", "d"]) is ClaimOutcome.OURS


def test_what_another_engine_puts_between_two_looks_is_loaded(start: Start) -> None:
    one, other = start(), start()
    claim = other.store.claim

    def late(keys: Sequence[str]) -> ClaimOutcome:
        """Let the other engine put the encoding after the look, and before the claim."""
        one.store.put("a", b"1")
        return claim(keys)

    other.store.claim = late  # type: ignore[method-assign]
    assert other.planner.may_run(request("s", "a"), 0)
    assert other.planner.has("a")


def test_what_is_in_the_encoder_cache_is_not_waited_for(start: Start) -> None:
    one, other = start(), start()
    one.planner.may_run(request("r", "a"), 0)
    other.planner.bind({"a": set[str]()})
    assert other.planner.may_run(request("s", "a"), 0)
    assert other.planner.counts == SharedCounts()


def test_a_claim_lasts_while_any_request_needs_it(start: Start) -> None:
    one, other = start(), start()
    first, second = request("r", "a"), request("s", "a")
    one.planner.may_run(first, 0)
    one.planner.may_run(second, 0)
    one.planner.finished(first)
    assert other.store.claim(["a"]) is ClaimOutcome.OTHERS
    one.planner.finished(second)
    assert other.store.claim(["a"]) is ClaimOutcome.OURS


def test_an_encode_goes_on_when_its_request_has_left_and_its_claim_ends_if_it_never_comes(start: Start) -> None:
    one, other = start(), start()
    asked = request("r", "a")
    one.planner.may_run(asked, 0)
    one.planner.allocated("a")
    one.step(r=5)
    one.planner.finished(asked)
    assert other.store.claim(["a"]) is ClaimOutcome.OTHERS
    one.now = WAIT
    one.step()
    assert other.store.claim(["a"]) is ClaimOutcome.OURS


def test_a_request_behind_its_last_item_asks_nobody(start: Start) -> None:
    one = start()

    class Last(list[Any]):
        """Items of which only the last one may be looked at."""

        def __getitem__(self, item: Any) -> Any:
            assert item == -1
            return super().__getitem__(item)

    asked = request("r", *(f"i{number}" for number in range(1000)))
    asked.mm_features = Last(asked.mm_features)
    assert one.planner.may_run(asked, 5000)


@pytest.fixture
def hosts(start: Start, tmp_path: Path) -> list[Engine]:
    """Return an engine on each of two hosts, and a second one on the second host."""
    return [start(host=host, far=tmp_path) for host in ("one", "other", "other")]


def test_what_another_host_has_made_is_loaded(hosts: list[Engine]) -> None:
    one, other, _ = hosts
    asked, same = request("r", "a"), request("s", "a")
    assert not one.planner.may_run(asked, 0)  # the store between hosts is asked first
    assert one.step() == ()
    assert one.pauses == [0.002]
    one.carry()
    assert one.planner.may_run(asked, 0)
    assert not other.planner.may_run(same, 0)
    other.carry()
    assert not other.planner.may_run(same, 0)  # it is being made
    one.encode("a")
    one.carry()
    other.carry()
    assert other.planner.may_run(same, 0)
    assert other.planner.has("a")
    other.planner.allocated("a")
    assert other.step(s=5) == ("a",)
    assert other.store.read("a") == b"a"
    assert one.planner.counts == SharedCounts(made=1)
    assert other.planner.counts == SharedCounts(loaded=1, brought=1)
    assert (one.way.counts, other.way.counts) == (StoreCounts(put=1), StoreCounts(fetched=1, awaited=1))


def test_what_one_engine_has_brought_all_engines_of_its_host_load(hosts: list[Engine]) -> None:
    one, other, third = hosts
    assert one.far is not None
    one.far.put("a", b"a")
    assert not other.planner.may_run(request("r", "a"), 0)
    assert not third.planner.may_run(request("s", "a"), 0)  # it waits for the claim of the other one
    other.carry()
    assert third.planner.may_run(request("s", "a"), 0)
    assert third.planner.has("a")
    assert third.way.counts == StoreCounts()


def test_requests_of_one_engine_wait_for_the_same_answer(hosts: list[Engine]) -> None:
    one = hosts[0]
    assert not one.planner.may_run(request("r", "a"), 0)
    assert not one.planner.may_run(request("s", "a"), 0)
    assert not one.planner.may_run(request("t", "b", "a"), 0)
    assert one.planner.may_run(request("text"), 0)
    one.carry()
    assert all(one.planner.may_run(request(name, *keys), 0) for name, keys in {"r": "a", "s": "a", "t": "ba"}.items())


def test_a_store_that_does_not_answer_delays_nobody_for_long(hosts: list[Engine]) -> None:
    one = hosts[0]
    assert not one.planner.may_run(request("r", "a", "b"), 0)
    one.now = ANSWER
    assert one.planner.may_run(request("r", "a", "b"), 0)
    assert one.planner.may_run(request("s", "c"), 0)  # others do not wait for it at all
    one.encode("a", "b", "c")
    assert one.planner.counts == SharedCounts(made=3)
    assert one.way.counts == StoreCounts(unavailable=3)


def test_an_engine_on_another_host_that_hangs_is_awaited_for_a_bounded_time(hosts: list[Engine]) -> None:
    one, other, _ = hosts
    one.planner.may_run(request("r", "a"), 0)
    one.carry()
    assert not other.planner.may_run(request("s", "a"), 0)
    other.carry()
    other.now = WAIT
    assert other.planner.may_run(request("s", "a"), 0)
    assert other.way.counts == StoreCounts(awaited=1, gave_up=1)


def test_what_was_brought_and_evicted_again_is_made(hosts: list[Engine]) -> None:
    one = hosts[0]
    assert one.far is not None
    one.far.put("a", b"a")
    asked = request("r", "a")
    assert not one.planner.may_run(asked, 0)
    one.carry()
    for path in one.store.directory.glob("*.enc"):
        path.unlink()
    assert one.planner.may_run(asked, 0)  # it is not brought again and again


def test_what_is_no_encoding_of_the_item_is_made(hosts: list[Engine]) -> None:
    one, other, _ = hosts
    assert one.far is not None
    one.far.put("a", b"malformed")
    assert not one.planner.may_run(request("r", "a"), 0)
    one.carry()
    assert one.planner.may_run(request("r", "a"), 0)
    one.encode("a")
    one.carry()
    assert one.planner.counts == SharedCounts(made=1)
    assert one.way.counts == StoreCounts(malformed=1)
    assert one.check.learnt == [(b"a", SharedItem("image", 4))]
    assert not other.planner.may_run(request("s", "a"), 0)  # and nobody loads it
    other.carry()
    assert other.planner.may_run(request("s", "a"), 0)
    assert not other.store.has("a")


@pytest.mark.parametrize("carried", [False, True])
def test_a_request_that_leaves_gives_up_its_claims_in_both_stores(hosts: list[Engine], carried: bool) -> None:
    one, other, _ = hosts
    asked = request("r", "a")
    one.planner.may_run(asked, 0)
    if carried:
        one.carry()
        assert one.planner.may_run(asked, 0)
    one.planner.finished(asked)
    one.carry()
    assert not other.planner.may_run(request("s", "a"), 0)
    other.carry()
    assert other.planner.may_run(request("s", "a"), 0)
    assert one.store.claim(["a"]) is ClaimOutcome.OURS


def test_what_could_not_be_put_on_the_host_is_claimed_nowhere(hosts: list[Engine]) -> None:
    one, other, _ = hosts
    asked = request("r", "a")
    one.planner.may_run(asked, 0)
    one.carry()
    assert one.planner.may_run(asked, 0)
    one.planner.allocated("a")
    one.step(r=5)
    one.planner.carried_out(1, [("a", one.store.put("a", bytes(2000)).value)])
    one.carry()
    assert other.far is not None
    assert other.far.claim(["a"]) is ClaimOutcome.OURS


def test_the_counts_are_those_of_the_metrics(start: Start) -> None:
    one, metrics = start(), SchedulerMetrics()
    one.planner.counts = SharedCounts(loaded=5, brought=4, made=2, awaited=3, gave_up=6)
    one.planner.count_into(metrics)
    assert (metrics.shared_host, metrics.shared_store, metrics.shared_made) == (1, 4, 2)
    assert (metrics.shared_awaited_host, metrics.shared_gave_up_host) == (3, 6)
    assert (metrics.shared_awaited_store, metrics.shared_store_unavailable) == (0, 0)


def test_the_counts_of_the_store_between_hosts_are_those_of_the_metrics(start: Start, tmp_path: Path) -> None:
    one, metrics = start(host="one", far=tmp_path), SchedulerMetrics()
    one.way.counts = StoreCounts(fetched=1, put=2, refused=3, unavailable=4, malformed=7, awaited=5, gave_up=6)
    one.planner.count_into(metrics)
    assert (metrics.shared_store_put, metrics.shared_store_refused, metrics.shared_store_unavailable) == (2, 3, 4)
    assert (metrics.shared_awaited_store, metrics.shared_gave_up_store, metrics.shared_store_malformed) == (5, 6, 7)
