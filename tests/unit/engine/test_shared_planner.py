"""Rules of the scheduler half of shared encodings, with the real store and a clock that the test moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_omni_sched.connectors.encodings import ClaimOutcome, EncodingStore
from vllm_omni_sched.engine.shared.planner import SharedCounts, SharedPlanner
from vllm_omni_sched.monitor.counts import SchedulerMetrics

WINDOW, WAIT = 20, 10.0


class Engine:
    """One engine's planner, with the worker's part of the store in ``folder``."""

    def __init__(self, folder: Path, *, reports_of_all: bool = True) -> None:
        self.now, self.pauses = 0.0, list[float]()
        self.store = EncodingStore(str(folder), "space", max_bytes=1000, ttl_seconds=60.0)
        self.planner = SharedPlanner(
            self.store,
            WINDOW,
            WAIT,
            reports_of_all=reports_of_all,
            clock=lambda: self.now,
            pause=self.pauses.append,
        )

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


def request(name: str, *keys: str, every: int = 5) -> Request:
    """Return a request with an item of four tokens every five tokens."""
    return Request(
        name,
        [
            SimpleNamespace(identifier=key, mm_position=SimpleNamespace(offset=every * number, length=4))
            for number, key in enumerate(keys)
        ],
    )


Start = Callable[..., Engine]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    engines = []

    def make(**how: Any) -> Engine:
        engines.append(Engine(tmp_path, **how))
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


def test_the_counts_are_those_of_the_metrics(start: Start) -> None:
    one, metrics = start(), SchedulerMetrics()
    one.planner.counts = SharedCounts(loaded=5, made=2, awaited=3, gave_up=6)
    one.planner.count_into(metrics)
    assert (metrics.shared_host, metrics.shared_made) == (5, 2)
    assert (metrics.shared_awaited, metrics.shared_gave_up) == (3, 6)
