"""SessionTracker and SessionMirror: whatever a session goes through, the worker ends up with what the scheduler has."""

from __future__ import annotations

import copy

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from vllm_omni_sched.errors import SessionOutOfSyncError
from vllm_omni_sched.items import SessionMirror, SessionTracker

Item = tuple[int, bool]
"""Number, and whether its data is there."""

NUM_GROUPS = 2
some_blocks = st.lists(st.lists(st.integers(0, 99), max_size=3), min_size=NUM_GROUPS, max_size=NUM_GROUPS)


def strip(item: Item) -> Item:
    return (item[0], False)


class Session(RuleBasedStateMachine):
    @initialize(num_tokens=st.integers(1, 20), num_items=st.integers(0, 5), blocks=some_blocks)
    def first_message(self, num_tokens: int, num_items: int, blocks: list[list[int]]) -> None:
        self.tokens = list(range(num_tokens))
        self.num_items = num_items
        self.blocks = copy.deepcopy(blocks)
        self.covered = 0
        self.tracker = SessionTracker(num_tokens, num_items, blocks, 0)
        self.mirror = SessionMirror(self.tokens, [(i, True) for i in range(num_items)], blocks, 0)
        self.updated = True

    @rule(tokens=st.lists(st.integers(0, 9), max_size=4), items=st.integers(0, 3), covered=st.integers(0, 30))
    def update(self, tokens: list[int], items: int, covered: int) -> None:
        """The next chunk: more of everything, and the frontier anywhere."""
        self.tokens += tokens
        first_new, self.num_items = self.num_items, self.num_items + items
        covered = min(covered, self.num_items)
        restored = {i: (i, True) for i in range(covered, self.tracker.covered)}
        message = self.tracker.update(self.tokens, self.num_items, self.blocks, covered, restored)
        assert message is not None
        new_items = [(i, i >= covered) for i in range(first_new, self.num_items)]
        self.mirror.apply(message, new_items, strip)
        assert message.tokens == (self.tokens[len(self.tokens) - len(message.tokens) :])
        self.covered = covered

    @rule(blocks=some_blocks)
    def run(self, blocks: list[list[int]]) -> None:
        """A running step gets more blocks."""
        for group, new in zip(self.blocks, blocks, strict=True):
            group += new
        self.tracker.append_blocks(blocks)
        self.mirror.append_blocks(blocks)

    @rule(blocks=some_blocks)
    def resume(self, blocks: list[list[int]]) -> None:
        """Preempted and back: other blocks, and all data is needed again."""
        self.blocks = copy.deepcopy(blocks)
        self.tracker.replace_blocks(blocks)
        self.mirror.replace_blocks(blocks)
        self.mirror.restore({i: (i, True) for i in range(self.covered)})
        self.tracker.covered = self.covered = 0

    @rule(which=st.integers(0, 2))
    def out_of_step(self, which: int) -> None:
        """A message that continues another state is refused and changes nothing."""
        before = (list(self.mirror.tokens), list(self.mirror.features), copy.deepcopy(self.mirror.block_ids))
        message = copy.deepcopy(self.tracker).update([*self.tokens, 1], self.num_items, self.blocks, self.covered, {})
        assert message is not None
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
            assert self.mirror.block_ids == self.blocks
            assert self.mirror.features == [(i, i >= self.covered) for i in range(self.num_items)]
            assert self.mirror.covered == self.covered


TestSession = Session.TestCase
TestSession.settings = settings(max_examples=150, stateful_step_count=20, deadline=None)


@pytest.mark.parametrize(
    ("tokens", "num_items", "blocks"),
    [([1, 2], 2, [[7, 8]]), ([1, 2, 3], 1, [[7, 8]]), ([1, 2, 3], 2, [[7]]), ([1, 2, 3], 2, [[7, 9]])],
    ids=["fewer tokens", "fewer items", "fewer blocks", "another block"],
)
def test_no_continuation_means_a_full_message(tokens: list[int], num_items: int, blocks: list[list[int]]) -> None:
    assert SessionTracker(3, 2, [[7, 8]], 0).update(tokens, num_items, blocks, 0, {}) is None
