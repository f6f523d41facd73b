"""What a worker holds of a session after each kind of message, and what is refused."""

from types import SimpleNamespace

import pytest

from vllm_omni_sched.config.errors import SessionOutOfSyncError
from vllm_omni_sched.items import SessionMirror, SessionTracker
from vllm_omni_sched.items.session import NULL_BLOCK, LiveBlocks


class Counted(LiveBlocks):
    """A table that counts the blocks which somebody looks at."""

    def __init__(self, ids):
        self._ids = ids
        self.looked_at = 0

    @property
    def table(self):
        return self._ids

    def end_of_nulls(self, start, stop):
        end = next((i for i in range(start, stop) if self._ids[i] != NULL_BLOCK), stop)
        self.looked_at += end - start + 1
        return end

    def __len__(self):
        return len(self._ids)

    def __getitem__(self, index):
        found = self._ids[index]
        self.looked_at += len(found) if isinstance(index, slice) else 1
        return found


def feature(name, data="raw"):
    return SimpleNamespace(name=name, data=data)


def strip(item):
    return SimpleNamespace(name=item.name, data=None)


def start(tokens=4, items=2, blocks=((1, 2),)):
    features = [feature(i) for i in range(items)]
    tracker = SessionTracker(tokens, items, blocks, covered=0)
    return tracker, SessionMirror(range(tokens), features, blocks, covered=0), features


def test_a_live_table_is_compared_once():
    """What has been compared with a table is not looked at again, as long as the table is the same object."""
    table = Counted(list(range(1, 2049)))
    tracker = SessionTracker(4, 2, (list(table.table),), covered=0)
    tracker.update(range(5), 2, (table,), covered=0, restored={})
    assert table.looked_at >= 2048
    table.looked_at = 0
    for tokens in range(6, 16):
        table.table.append(10_000 + tokens)
        assert tracker.update(range(tokens), 2, (table,), covered=0, restored={}) is not None
    assert table.looked_at <= 3 * 10
    moved = Counted(list(table.table))
    moved.table[:2] = [2, 1]
    assert tracker.update(range(16), 2, (moved,), covered=0, restored={}) is None


def test_blocks_that_a_window_left_behind_are_null_blocks_at_the_worker():
    table = Counted([1, 2, 3])
    tracker = SessionTracker(4, 2, ([1, 2, 3],), covered=0)
    mirror = SessionMirror(range(4), [feature(0), feature(1)], ([1, 2, 3],), covered=0)
    for tokens, nulls in ((5, 0), (6, 2), (7, 3), (8, 4)):
        table.table[:nulls] = [NULL_BLOCK] * nulls
        table.table.append(tokens)
        mirror.apply(tracker.update(range(tokens), 2, (table,), covered=0, restored={}), [], strip)
        assert mirror.block_ids == [table.table]


@pytest.mark.parametrize(
    ("tokens", "items", "blocks"),
    [(3, 2, ((1, 2),)), (4, 1, ((1, 2),)), (4, 2, ((1,),)), (4, 2, ((1, 9, 3),)), (4, 2, ((9, 2, 3),))],
    ids=["fewer tokens", "fewer items", "fewer blocks", "another last block", "another first block"],
)
def test_what_is_no_continuation_is_sent_in_full(tokens, items, blocks):
    tracker, _, _ = start()
    assert tracker.update(range(tokens), items, blocks, covered=0, restored={}) is None


@pytest.mark.parametrize("changed", [{"tokens_before": 3}, {"items_before": 1}, {"blocks_before": (1,)}])
def test_a_worker_refuses_an_update_of_another_state(changed):
    tracker, mirror, _ = start()
    update = tracker.update(range(5), 2, ((1, 2),), covered=0, restored={})._replace(**changed)
    with pytest.raises(SessionOutOfSyncError, match=r"the worker holds \(4, 2, \(2,\)\)"):
        mirror.apply(update, [], strip)
    assert len(mirror.tokens) == 4
