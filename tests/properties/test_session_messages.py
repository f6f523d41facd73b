"""SessionTracker and SessionMirror: whatever a session goes through, the worker ends up with what the scheduler has."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from vllm_omni_sched.config.errors import SessionOutOfSyncError
from vllm_omni_sched.items import SessionMirror, SessionTracker
from vllm_omni_sched.items.session import NULL_BLOCK, LiveBlocks

Item = tuple[int, bool]
"""Number, and whether its data is there."""

NUM_GROUPS = 2
some_blocks = st.lists(st.lists(st.integers(1, 9), max_size=3), min_size=NUM_GROUPS, max_size=NUM_GROUPS)


def strip(item: Item) -> Item:
    return (item[0], False)


class Table(LiveBlocks):
    """A scheduler's table of blocks: one list as long as the request keeps them."""

    def __init__(self, ids: list[int]) -> None:
        self._ids = ids

    @property
    def table(self) -> list[int]:
        return self._ids

    def end_of_nulls(self, start: int, stop: int) -> int:
        return next((i for i in range(start, stop) if self._ids[i] != NULL_BLOCK), stop)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: Any) -> Any:
        return self._ids[index]


class Session(RuleBasedStateMachine):
    @initialize(live=st.booleans(), num_tokens=st.integers(1, 20), num_items=st.integers(0, 5), blocks=some_blocks)
    def first_message(self, live: bool, num_tokens: int, num_items: int, blocks: list[list[int]]) -> None:
        self.live = live
        self.tokens = list(range(num_tokens))
        self.num_items = num_items
        self.blocks = copy.deepcopy(blocks)
        self.covered = 0
        self.told_the_truth = True
        self.start()

    def start(self) -> None:
        """Send the session in full."""
        items = [(i, i >= self.covered) for i in range(self.num_items)]
        self.tracker = SessionTracker(len(self.tokens), self.num_items, self.blocks, self.covered)
        self.mirror = SessionMirror(self.tokens, items, self.blocks, self.covered)
        self.told_the_truth = True

    def block_ids(self) -> Any:
        return tuple(map(Table, self.blocks)) if self.live else tuple(self.blocks)

    @rule(tokens=st.lists(st.integers(0, 9), max_size=4), items=st.integers(0, 3), covered=st.integers(0, 30))
    def update(self, tokens: list[int], items: int, covered: int) -> None:
        """Send the next chunk: more of everything, and the frontier anywhere."""
        self.tokens += tokens
        first_new, self.num_items = self.num_items, self.num_items + items
        self.covered = min(covered, self.num_items)
        restored = {i: (i, True) for i in range(self.covered, self.tracker.covered)}
        message = self.tracker.update(self.tokens, self.num_items, self.block_ids(), self.covered, restored)
        if message is None:
            assert not self.told_the_truth
            self.start()
        else:
            new_items = [(i, i >= self.covered) for i in range(first_new, self.num_items)]
            self.mirror.apply(message, new_items, strip)
            assert message.tokens == (self.tokens[len(self.tokens) - len(message.tokens) :])
        # Whatever was said before: what a worker has now is what the scheduler has.
        assert self.mirror.block_ids == self.blocks
        self.told_the_truth = True

    @rule(blocks=some_blocks)
    def run(self, blocks: list[list[int]]) -> None:
        """A running step gets more blocks."""
        self.say(blocks)
        for group, new in zip(self.blocks, blocks, strict=True):
            group += new

    def say(self, blocks: list[list[int]]) -> None:
        """Blocks of a running step, to both ends."""
        self.tracker.append_blocks(blocks)
        self.mirror.append_blocks(blocks)

    @rule(blocks=some_blocks)
    def resume(self, blocks: list[list[int]]) -> None:
        """Preempt and resume the session, with other blocks and a new tracker."""
        self.blocks = copy.deepcopy(blocks)
        self.covered = 0
        self.start()

    @rule(count=st.integers(1, 3))
    def leave_behind(self, count: int) -> None:
        """A sliding window leaves blocks behind, and nobody is told."""
        group = self.blocks[0]
        first = next((i for i, block in enumerate(group) if block != NULL_BLOCK), len(group))
        last = min(first + count, len(group))
        group[first:last] = [NULL_BLOCK] * (last - first)
        if last > first and not self.live:
            self.told_the_truth = False  # among blocks that are no live table, a null block is as good as any other

    @rule(order=st.randoms(use_true_random=False), blocks=some_blocks)
    def move_untold(self, order: Any, blocks: list[list[int]]) -> None:
        """The session gets its blocks in another order, and workers are told of some that are new."""
        self.blocks = [order.sample(group, len(group)) + new for group, new in zip(self.blocks, blocks, strict=True)]
        self.say(blocks)
        self.told_the_truth = False

    @rule(blocks=some_blocks, others=some_blocks)
    def say_other_blocks(self, blocks: list[list[int]], others: list[list[int]]) -> None:
        for group, new in zip(self.blocks, blocks, strict=True):
            group += new
        self.say(others)
        self.told_the_truth = self.told_the_truth and blocks == others

    @rule(which=st.integers(0, 2))
    def out_of_step(self, which: int) -> None:
        """A message that continues another state is refused and changes nothing."""
        before = (list(self.mirror.tokens), list(self.mirror.features), copy.deepcopy(self.mirror.block_ids))
        tracker = copy.deepcopy(self.tracker)
        message = tracker.update([*self.tokens, 1], self.num_items, self.block_ids(), self.covered, {})
        if message is None:
            assert not self.told_the_truth
            return
        wrong = [
            message._replace(tokens_before=message.tokens_before + 1),
            message._replace(items_before=message.items_before + 1),
            message._replace(blocks_before=(*message.blocks_before[:-1], message.blocks_before[-1] + 1)),
        ]
        with pytest.raises(SessionOutOfSyncError, match="continues"):
            self.mirror.apply(wrong[which], [], strip)
        assert before == (list(self.mirror.tokens), list(self.mirror.features), self.mirror.block_ids)

    @invariant()
    def same_on_both_sides(self) -> None:
        if hasattr(self, "mirror"):
            assert list(self.mirror.tokens) == self.tokens
            assert self.mirror.features == [(i, i >= self.covered) for i in range(self.num_items)]
            assert self.mirror.covered == self.covered


TestSession = Session.TestCase
TestSession.settings = settings(max_examples=150, stateful_step_count=20, deadline=None)


@pytest.mark.parametrize(
    ("tokens", "num_items", "blocks"),
    [
        ([1, 2], 2, [[7, 8]]),
        ([1, 2, 3], 1, [[7, 8]]),
        ([1, 2, 3], 2, [[7]]),
        ([1, 2, 3], 2, [[7, 9]]),
        ([1, 2, 3], 2, [[9, 8]]),
    ],
    ids=["fewer tokens", "fewer items", "fewer blocks", "another last block", "another first block"],
)
def test_no_continuation_means_a_full_message(tokens: list[int], num_items: int, blocks: list[list[int]]) -> None:
    assert SessionTracker(3, 2, [[7, 8]], 0).update(tokens, num_items, blocks, 0, {}) is None
