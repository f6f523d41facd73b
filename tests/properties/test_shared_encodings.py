"""Engines that share encodings: each item is made once, every request runs, and the store keeps its bound."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.engine.test_shared_planner import Engine, Request, encoding, request
from vllm_omni_sched.connectors.encodings import EncodingStore, PutOutcome

KEYS = st.sampled_from("abcdefg")
REQUESTS = st.lists(st.lists(KEYS, min_size=1, max_size=4, unique=True), max_size=4)


class Serving(Engine):
    """An engine that runs its requests one step at a time, and encodes for a number of steps."""

    def __init__(self, folder: Path, keys: list[list[str]], number: int, steps_of_an_encode: int) -> None:
        super().__init__(folder)
        self.waiting = [request(f"{number}-{place}", *own) for place, own in enumerate(keys)]
        self.cached: dict[str, object] = {}
        self.encodes: list[tuple[int, str]] = []
        self.made: list[str] = []
        self.steps, self.steps_of_an_encode = 0, steps_of_an_encode
        self.planner.bind(self.cached)

    def one_step(self) -> None:
        self.steps += 1
        scheduled: list[Request] = []
        for one in list(self.waiting):
            if not self.planner.may_run(one, 0):
                continue
            scheduled.append(one)
            self.waiting.remove(one)
            for feature in one.mm_features:
                key = feature.identifier
                if key in self.cached:
                    continue
                loads = self.planner.has(key)
                self.allocated(key)
                self.cached[key] = ()
                if not loads:
                    self.made.append(key)
                    self.encodes.append((self.steps + self.steps_of_an_encode, key))
        load = self.step(**{one.request_id: 5 * len(one.mm_features) for one in scheduled})
        for key in load:
            assert self.store.read(key) == encoding(key)
        self.carried_out(self.steps)
        for one in scheduled:
            self.planner.finished(one)
        for due, key in list(self.encodes):
            if due <= self.steps:
                self.encodes.remove((due, key))
                assert self.store.put(key, encoding(key)) is PutOutcome.STORED
                self.carried_out(0, [(key, "stored")])


@given(
    st.lists(REQUESTS, min_size=2, max_size=4),
    st.lists(st.integers(0, 5), min_size=4, max_size=4),
    st.randoms(use_true_random=False),
)
@settings(max_examples=25, deadline=None)
def test_every_item_is_made_once_and_every_request_runs(engines, delays, rng) -> None:  # type: ignore[no-untyped-def]
    with tempfile.TemporaryDirectory() as folder:
        serving = [Serving(Path(folder), keys, number, delays[number]) for number, keys in enumerate(engines)]
        for _ in range(200):
            if not any(one.waiting or one.encodes for one in serving):
                break
            for one in rng.sample(serving, len(serving)):
                one.one_step()
        asked = {key for keys in engines for own in keys for key in own}
        assert [one.waiting for one in serving] == [[] for _ in serving]
        assert sorted(key for one in serving for key in one.made) == sorted(asked)
        assert sum(one.planner.counts.gave_up for one in serving) == 0
        for one in serving:
            one.planner.close()


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2), st.sampled_from(["put", "pin", "unpin", "claim", "release"]), KEYS, st.integers(1, 60)
        ),
        max_size=40,
    )
)
@settings(max_examples=25, deadline=None)
def test_the_store_keeps_its_bound_and_what_is_pinned(steps) -> None:  # type: ignore[no-untyped-def]
    with tempfile.TemporaryDirectory() as folder:
        members = [EncodingStore(folder, "space", max_bytes=100, ttl_seconds=60.0) for _ in range(3)]
        pinned: dict[tuple[int, str], bytes] = {}
        for who, what, key, size in steps:
            member = members[who]
            if what == "put":
                member.put(key, bytes(size))
            elif what == "pin" and member.pin(key):
                pinned.setdefault((who, key), member.read(key))
            elif what == "unpin":
                member.unpin(key)
                pinned.pop((who, key), None)
            elif what == "claim":
                member.claim([key])
            elif what == "release":
                member.release(key)
            assert member.use().num_bytes <= 100
            for (holder, held), content in pinned.items():
                assert members[holder].read(held) == content
        for member in members:
            member.close()
        assert list(Path(folder).iterdir()) == []
