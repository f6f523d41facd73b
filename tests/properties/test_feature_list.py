"""FeatureList against vLLM's strip, under any sequence of progress, rewinds, growth and release."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vllm_omni_sched.items import FeatureList, SpillFile


@dataclass(frozen=True)
class Position:
    offset: int
    length: int


@dataclass(frozen=True)
class Feature:
    number: int
    mm_position: Position
    data: bytes | None = field(repr=False)

    @property
    def end(self) -> int:
        return self.mm_position.offset + self.mm_position.length


def strip(feature: Feature) -> Feature:
    return feature if feature.data is None else replace(feature, data=None)


class StripFrontier(RuleBasedStateMachine):
    """`truth` is the list as vLLM would keep it: whole. A worker is sent `as_sent`, and later given back `rewind`."""

    @initialize(max_bytes=st.sampled_from([0, 300, 1 << 20]), nested=st.booleans())
    def start(self, max_bytes: int, nested: bool) -> None:
        self.truth: list[Feature] = []
        self.features = FeatureList()
        self.spill = SpillFile(None, max_bytes)
        self.nested = nested
        self.worker: list[Feature] = []
        self.num_computed = 0

    def teardown(self) -> None:
        if hasattr(self, "features"):
            self.features.close()
            self.spill.close()

    @rule(sizes=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), max_size=5), inside=st.integers(0, 3))
    def extend(self, sizes: list[tuple[int, int]], inside: int) -> None:
        end = max((feature.end for feature in self.truth), default=0)
        new = []
        for gap, length in sizes:
            new.append(Position(end + gap, length))
            if self.nested and inside < length:
                new.append(Position(end + gap + inside, 1))
            end += gap + length
        data = [None if number % 7 == 3 else bytes([number % 256]) * 20 for number in range(len(self.truth), 1000)]
        features = [Feature(len(self.truth) + i, position, data[i]) for i, position in enumerate(new)]
        self.truth += features
        self.features.extend(features)

    @rule(num_computed=st.integers(0, 120))
    def send(self, num_computed: int) -> None:
        """Send a full message to a worker with so many computed tokens."""
        self.num_computed = num_computed
        self.worker = list(self.features.as_sent(num_computed, strip))
        assert [replace(f, data=None) for f in self.worker] == [replace(f, data=None) for f in self.truth]

    @rule(num_computed=st.integers(0, 120))
    def advance(self, num_computed: int) -> None:
        """Progress that the worker strips by itself, or (backwards) a message that must bring the data."""
        former = self.features.frontier
        frontier = self.features.advance(num_computed)
        self.worker += self.features[len(self.worker) :]
        for i in range(frontier, former):
            self.worker[i] = self.features[i]
        for i in range(former, frontier):
            self.worker[i] = strip(self.worker[i])
        self.num_computed = num_computed

    @rule(num_computed=st.integers(0, 120))
    def rewind(self, num_computed: int) -> None:
        """Preempt the request: the worker gets back what it must encode again."""
        former = self.features.frontier
        back = self.features.rewind(num_computed)
        assert list(back) == list(range(self.features.frontier, former))
        for i, feature in back.items():
            self.worker[i] = feature
        self.num_computed = min(num_computed, self.num_computed)

    @precondition(lambda self: self.truth)
    @rule(batch=st.integers(1, 4))
    def release(self, batch: int) -> None:
        before = self.features.num_released
        released = self.features.release_committed(batch, self.spill, strip)
        assert self.features.num_released == before + released <= self.features.frontier

    @invariant()
    def worker_has_what_it_can_still_need(self) -> None:
        if hasattr(self, "features"):
            for held, whole in zip(self.worker, self.truth, strict=False):
                if whole.end > self.num_computed:
                    assert held == whole

    @invariant()
    def worker_has_nothing_else(self) -> None:
        if hasattr(self, "features") and not self.nested:
            for held in self.worker[: self.features.frontier]:
                assert held.data is None

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "features"):
            assert [self.features.with_data(i) for i in range(len(self.truth))] == self.truth
            assert list(self.features[self.features.frontier :]) == self.truth[self.features.frontier :]


TestStripFrontier = StripFrontier.TestCase
TestStripFrontier.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)


@pytest.mark.parametrize("num_items", [1_000, 8_000])
def test_a_session_touches_each_item_a_fixed_number_of_times(num_items: int) -> None:
    spill = SpillFile(None, 1 << 30)
    features = FeatureList()
    for frame in range(num_items):
        features.extend([Feature(frame, Position(frame, 1), b"x")])
        features.advance(frame)
        features.release_committed(64, spill, strip)
    assert features.items_touched <= num_items
    assert features.items_touched >= num_items - 64
    features.close()


def test_sending_touches_only_what_changed() -> None:
    features = FeatureList(Feature(i, Position(i, 1), b"x") for i in range(1_000))
    sent: Any = features.as_sent(900, strip)
    touched = features.items_touched
    assert features.as_sent(903, strip) is sent
    assert features.items_touched - touched == 3
    features.rewind(901)
    assert features.items_touched - touched == 5


def test_a_first_message_is_the_list_itself_unless_it_grows() -> None:
    """Nothing is copied for a prompt of many items; a session's list would show a worker what it was not told of."""
    features, session = (FeatureList(Feature(i, Position(i, 1), b"x") for i in range(8)) for _ in range(2))
    session.grows = True
    sent: Any = features.as_sent(0, strip)
    assert sent is features
    assert features.items_touched == 0
    sent = session.as_sent(0, strip)
    session.append(Feature(8, Position(8, 1), b"x"))
    assert len(sent) == 8
    sent = features.as_sent(3, strip)
    assert sent is not features
    assert [feature.data is None for feature in sent] == [True] * 3 + [False] * 5
    assert features.as_sent(0, strip) is not features, "the worker's own list is kept up to date from here on"
    assert all(feature.data for feature in features)
