"""Receivers ask again and again for what is not there yet: that must cost nearly nothing, and miss nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.arena import EDGE, FakeClock, pixels, place, small
from vllm_omni_sched.connectors.arena import ArenaTransport, inbox
from vllm_omni_sched.connectors.arena.index import Index
from vllm_omni_sched.connectors.arena.memory import ByteLocks
from vllm_omni_sched.connectors.framing import make_message

LOOKS = 50


class Ends:
    """A sender and a receiver, and how often the receiver has searched an index."""

    def __init__(self, root: str) -> None:
        self.sender, self.receiver = (ArenaTransport(small(root), clock=FakeClock()) for _ in range(2))
        self.searched = 0
        self.put("first")
        assert self.receiver.get(EDGE, "first") is not None

    def put(self, key: str) -> None:
        self.sender.put(make_message(EDGE, key, pixels(1, 10)))

    def look(self, key: str) -> int:
        """How often indices were searched in looking `LOOKS` times in vain."""
        before = self.searched
        assert [self.receiver.get(EDGE, key) for _ in range(LOOKS)] == [None] * LOOKS
        return self.searched - before


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    monkeypatch.setattr(inbox, "monotonic_seconds", FakeClock())
    with place() as root:
        ends, find = Ends(root), Index.find

        def counted(self: Index, digest: int) -> list[int]:
            ends.searched += 1
            return find(self, digest)

        monkeypatch.setattr(Index, "find", counted)
        yield ends
        ends.sender.close()
        ends.receiver.close()


def test_an_index_in_which_nothing_is_new_is_searched_once(ends: Ends) -> None:
    assert ends.look("later") == 1
    ends.put("later")
    assert ends.receiver.get(EDGE, "later") is not None


def test_a_key_that_is_put_again_is_found_again(ends: Ends) -> None:
    for _ in range(3):
        assert ends.look("again") == 1
        ends.put("again")
        assert ends.receiver.get(EDGE, "again") is not None


def test_messages_of_others_seldom_cost_a_search(ends: Ends) -> None:
    ends.look("wanted")
    before = ends.searched
    for number in range(20):
        ends.put(f"other {number}")
        assert ends.receiver.get(EDGE, "wanted") is None
    assert ends.searched - before <= 3, "one in 256 has the same last byte"


def test_only_so_many_keys_are_remembered(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "REMEMBERED", 4)
    for number in range(40):
        assert ends.receiver.get(EDGE, f"never {number}") is None
    assert ends.receiver._inbox is not None
    assert len(ends.receiver._inbox._misses) <= 4


def test_what_the_senders_have_not_told_of_is_found_all_the_same(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    monkeypatch.setattr(inbox, "monotonic_seconds", clock)
    assert ends.look("quiet") == 1
    monkeypatch.setattr(Index, "_tell", lambda self, digest: None)
    ends.put("quiet")
    clock.now += 2 * inbox.LOOK_AGAIN
    assert ends.receiver.get(EDGE, "quiet") is not None


def test_a_message_whose_slot_somebody_has_locked_is_got_as_soon_as_it_is_free(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends.put("locked")
    with monkeypatch.context() as patch:
        patch.setattr(ByteLocks, "acquire", lambda self, at: False)
        assert ends.look("locked") == LOOKS
    assert ends.receiver.get(EDGE, "locked") is not None
