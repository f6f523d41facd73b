"""Rules of the scheduler half of shared encodings, with the real store and a clock that the test moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from vllm_omni_sched.connectors.encodings import ClaimOutcome, EncodingStore
from vllm_omni_sched.engine.contents import Contents
from vllm_omni_sched.engine.shared.layouts import EncodingLayouts, Layout
from vllm_omni_sched.engine.shared.messages import SharedReport
from vllm_omni_sched.engine.shared.planner import SharedCounts, SharedPlanner
from vllm_omni_sched.resource.engine.reuse import NotReused

WINDOW, WAIT = 20, 10.0
EMBEDS, HIDDEN = 4, 2


class Engine:
    """One engine's planner, with the worker's part of the store in ``folder``."""

    def __init__(self, folder: Path, *, reports_of_all: bool = True, layouts: EncodingLayouts | None = None) -> None:
        self.now, self.pauses = 0.0, list[float]()
        self.planner = SharedPlanner(
            lambda space: EncodingStore(str(folder), space, max_bytes=10_000, ttl_seconds=60.0),
            "space",
            NamedContents(),
            layouts or EncodingLayouts({"": Layout(HIDDEN, "F32")}),
            WINDOW,
            WAIT,
            reports_of_all=reports_of_all,
            clock=lambda: self.now,
            pause=self.pauses.append,
        )

    @property
    def store(self) -> EncodingStore:
        assert self.planner.store is not None
        return self.planner.store

    def step(self, **scheduled: int) -> tuple[str, ...]:
        return tuple(self.planner.take_orders(scheduled).load.values())

    def allocated(self, key: str) -> None:
        self.planner.allocated(request("any", key), 0)

    def carried_out(self, step: int, offered: Sequence[tuple[str, str]] = ()) -> None:
        self.planner.carried_out(SharedReport(step, list(offered), self.planner.epoch))

    def encode(self, *keys: str) -> None:
        """Make room for these items, encode them in a step, and put them into the store."""
        for key in keys:
            assert not self.planner.has(key)
            self.allocated(key)
        self.step(r=WINDOW)
        for key in keys:
            self.carried_out(0, [(key, self.store.put(key, encoding(key)).value)])


class NamedContents(Contents):
    """Items have the digest that the test gives them: their name, unless it says another one."""

    def of(self, feature: Any) -> str | None:
        digest: str | None = feature.digest
        return digest


def encoding(key: str, num_embeds: int = EMBEDS, hidden: int = HIDDEN) -> bytes:
    """Return the file of an encoding, whose numbers depend on the key."""
    made = np.full((num_embeds, hidden), float(ord(key[0])), np.float32)
    return bytes(save({"encoding": made}))


@dataclass
class Request:
    request_id: str
    mm_features: list[Any] = field(default_factory=list)
    num_computed_tokens: int = 0

    def get_num_encoder_embeds(self, input_id: int) -> int:
        return int(self.mm_features[input_id].mm_position.length)


def item(name: str, start: int, digest: str | None) -> Any:
    position = SimpleNamespace(offset=start, length=EMBEDS)
    return SimpleNamespace(identifier=name, modality="image", mm_position=position, digest=digest)


def request(name: str, *keys: str, every: int = 5) -> Request:
    """Return a request with an item of four tokens every five tokens."""
    return Request(name, [item(key, every * number, key) for number, key in enumerate(keys)])


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
    other.allocated("a")
    assert other.step(s=5) == ("a",)
    assert other.step(s=1) == ()
    assert other.store.read("a") == encoding("a")
    other.carried_out(1, [])
    with pytest.raises(KeyError):
        other.store.read("a")
    assert (one.planner.counts, other.planner.counts) == (SharedCounts(made=1), SharedCounts(loaded=1))


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


def test_a_claim_ends_when_the_step_has_passed_the_item_without_an_encode(start: Start) -> None:
    one, other = start(), start()
    asked = request("r", "a", "b", "c", "d")
    one.planner.may_run(asked, 0)
    one.step(r=6)  # computed tokens of a and b, which were in its own encoder cache
    assert other.store.claim(["a", "b"]) is ClaimOutcome.OURS
    assert other.store.claim(["c"]) is ClaimOutcome.OTHERS
    one.planner.finished(asked)
    assert other.store.claim(["c", "d"]) is ClaimOutcome.OURS


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
    one.allocated("a")
    one.step(r=5)
    one.planner.finished(asked)
    assert other.store.claim(["a"]) is ClaimOutcome.OTHERS
    one.now = WAIT
    one.step()
    assert other.store.claim(["a"]) is ClaimOutcome.OURS


def test_the_key_of_an_encoding_is_what_its_item_is_made_of_and_not_its_name(start: Start) -> None:
    one, other = start(), start()
    asked = Request("r", [item("x", 0, "cat"), item("x", 5, "cat"), item("y", 10, "dog")])
    assert one.planner.may_run(asked, 0)
    for number in (0, 2):
        one.planner.allocated(asked, number)
    assert one.planner.take_orders({"r": 14}).offer == {"x": "cat", "y": "dog"}
    one.carried_out(1, [(key, one.store.put(key, encoding(key)).value) for key in ("cat", "dog")])
    swapped = Request("s", [item("x", 0, "dog"), item("z", 5, "cat"), item("y", 10, "bird")])
    assert other.planner.may_run(swapped, 0)
    assert [other.planner.has(name) for name in "xzy"] == [True, True, False]
    for number in range(3):
        other.planner.allocated(swapped, number)
    orders = other.planner.take_orders({"s": 14})
    assert (orders.load, orders.offer) == ({"x": "dog", "z": "cat"}, {"y": "bird"})


def test_an_item_whose_data_cannot_be_read_is_encoded_here_and_not_shared(start: Start) -> None:
    one = start()
    asked = Request("r", [item("x", 0, None)])
    one.store.put("x", encoding("x"))
    assert one.planner.may_run(asked, 0)
    assert not one.planner.has("x")
    one.planner.allocated(asked, 0)
    orders = one.planner.take_orders({"r": 5})
    assert (orders.load, orders.offer) == ({}, {})
    assert one.planner.counts.not_reused[NotReused.UNKNOWN_CONTENT] == 1


@pytest.mark.parametrize(
    "data", [encoding("a", 2), encoding("a", EMBEDS, 3), encoding("a")[:9], b"", b"no encoding at all"]
)
def test_what_does_not_fit_is_removed_and_encoded_here(start: Start, data: bytes) -> None:
    one = start()
    one.store.put("a", data)
    assert one.planner.may_run(request("r", "a"), 0)
    one.encode("a")
    assert one.planner.counts.not_reused[NotReused.OTHER_LAYOUT] == 1
    assert one.planner.may_run(request("s", "a"), 0)
    assert one.planner.has("a")  # its own


def test_after_the_weights_may_have_changed_nothing_is_shared_until_the_workers_name_a_store(start: Start) -> None:
    one, other = start(), start()
    assert one.planner.may_run(request("r", "a"), 0)
    one.encode("a")
    assert one.planner.may_run(request("r", "b"), 0)
    assert not other.planner.may_run(request("s", "b"), 0)
    one.planner.forget()
    assert other.planner.may_run(request("s", "b"), 0)  # the claim has ended
    asked = request("t", "a")
    assert one.planner.may_run(asked, 0)
    assert not one.planner.has("a")
    one.allocated("a")
    orders = one.planner.take_orders({"t": 5})
    assert (orders.load, orders.offer, orders.epoch) == ({}, {}, 1)
    one.planner.carried_out(SharedReport(1, [("b", "stored")], 0, "elsewhere"))  # of before
    assert one.planner.store is None
    one.planner.carried_out(SharedReport(2, [], 1, "changed"))
    assert one.planner.may_run(asked, 0)
    assert not one.planner.has("a")
    one.encode("a")
    assert one.planner.may_run(request("u", "a"), 0)
    assert one.planner.has("a")
    assert other.planner.may_run(request("v", "a"), 0)
    assert other.planner.has("a")  # its own store has its own


def test_what_workers_may_still_read_stays_pinned_until_they_have_carried_out_their_orders(start: Start) -> None:
    one = start()
    store = one.store
    store.put("a", encoding("a"))
    assert one.planner.may_run(request("r", "a"), 0)
    assert one.planner.has("a")
    one.allocated("a")
    assert one.step(r=5) == ("a",)
    one.planner.forget()
    assert store.read("a") == encoding("a")
    one.planner.carried_out(SharedReport(1, [], 0))
    with pytest.raises(KeyError):
        store.read("a")
    one.planner.forget()  # twice is fine
    assert one.planner.epoch == 2
