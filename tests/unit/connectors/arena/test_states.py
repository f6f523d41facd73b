"""States of messages as both sides see them, and what is believed of a slot that somebody is at just now."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.arena import EDGE, MIB, pixels, place, small
from vllm_omni_sched.connectors.arena import ArenaTransport, meeting
from vllm_omni_sched.connectors.arena.index import Index, Layout, State
from vllm_omni_sched.connectors.arena.memory import Memory
from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.framing import make_message

SMALL, LARGE = 100, 20_000


@pytest.fixture
def path() -> Iterator[ArenaTransport]:
    with place() as root:
        path = ArenaTransport(small(root))
        yield path
        path.close()


def put(path: ArenaTransport, key: str, nbytes: int = LARGE, fill: int = 1) -> None:
    path.put(make_message(EDGE, key, pixels(fill, nbytes)))


def test_who_looks_without_a_lock_sees_one_state_or_the_other(tmp_path: Path) -> None:
    """Not the zeros that `Struct.pack_into` writes first: zero is FREE, and what is free is used again."""
    sizes = Layout.of(64, 4096)
    with (tmp_path / "index").open("w+b") as file:
        file.truncate(sizes.nbytes)
        index = Index(Memory(os.dup(file.fileno()), sizes.nbytes, sizes.nbytes), sizes)
        index._set(3, State.READY)
        child = os.fork()
        if not child:
            while True:
                index._set(3, State.LEASED)
                index._set(3, State.READY)
        try:
            seen = {index.state(3) for _ in range(300_000)}
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    assert seen <= {State.READY, State.LEASED}


def test_a_slot_that_looks_free_for_a_moment_is_not_used_again(
    path: ArenaTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(path, "k")
    arrival = path.get(EDGE, "k")
    assert arrival is not None
    real, looks = Index.state, iter([State.FREE])
    monkeypatch.setattr(Index, "state", lambda self, slot: next(looks, None) or real(self, slot))
    path.reap()
    monkeypatch.undo()
    for i in range(20):
        put(path, f"{i}", fill=2)
    assert (arrival.open() == 1).all()
    assert path.health().facts["damaged"] == 0


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_who_cannot_be_looked_at_is_not_dead(
    path: ArenaTransport, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    put(path, "k")
    assert path.get(EDGE, "k") is not None
    (inbox,) = path.directory.glob("*.in")

    def fails(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", fails)
    assert meeting.is_alive(inbox)
    monkeypatch.undo()
    assert meeting.is_alive(inbox)


def test_what_was_got_and_is_put_again_counts_as_got(path: ArenaTransport) -> None:
    put(path, "k", SMALL)
    assert path.get(EDGE, "k") is not None
    put(path, "k", SMALL)
    (traffic,) = path.traffic().values()
    assert traffic.got_at is not None


def test_long_keys_are_not_remembered(path: ArenaTransport) -> None:
    for i in range(5):
        key = f"{i}" * MIB
        assert path.get(Edge("long", "keys"), key) is None
    assert path._inbox is not None
    assert len(path._inbox._misses) == 0
