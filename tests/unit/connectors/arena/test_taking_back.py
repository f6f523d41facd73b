"""What `discard`, `withdraw` and a second `put` say of a message that somebody is just looking at.

Whoever looks has the lock of the message's slot, for microseconds, unless its process is stopped just then.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.support.arena import EDGE, MIB, FakeClock, pixels, small
from tests.support.arena_faults import IN_POOL, IN_RING
from vllm_omni_sched.connectors.arena import ArenaTransport
from vllm_omni_sched.connectors.arena.memory import ByteLocks
from vllm_omni_sched.connectors.framing import make_message

SIZES = pytest.mark.parametrize("nbytes", [IN_RING, IN_POOL], ids=["ring", "pool"])


class Looker:
    """Somebody who has the lock of a slot, and lets go of it at the n-th wait of the sender, or when told."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.waits, self.goes_at = 0, 0
        self.let_go: Callable[[], None] = lambda: None

    def sleep(self, seconds: float) -> None:
        self.waits += 1
        self.clock.now += seconds
        if self.waits == self.goes_at:
            self.let_go()

    @contextmanager
    def at_the_only_message(self, path: ArenaTransport) -> Iterator[None]:
        outbox = path._outbox
        assert outbox is not None
        (slot,) = outbox.sent
        (file,) = path.directory.glob("*.out")
        fd, at = os.open(file, os.O_RDWR), outbox.layout.record_at(slot)
        locks = ByteLocks(fd)
        assert locks.acquire(at)
        self.let_go = lambda: locks.release(at)
        try:
            yield
        finally:
            os.close(fd)  # and with it, the lock


@pytest.fixture
def looker() -> Looker:
    return Looker()


@pytest.fixture
def ends(root: str, looker: Looker) -> Iterator[tuple[ArenaTransport, ArenaTransport]]:
    pool = {"block_bytes": 4096, "initial_bytes": 65536, "max_bytes": MIB, "inline_bytes": 1024}
    options = small(root, image=pool, ttl_seconds=60)
    sender, receiver = (ArenaTransport(options, clock=looker.clock, sleep=looker.sleep) for _ in range(2))
    yield sender, receiver
    sender.close()
    receiver.close()


def put(path: ArenaTransport, value: int, nbytes: int) -> None:
    path.put(make_message(EDGE, "k", pixels(value, nbytes)))


def got(path: ArenaTransport) -> list[int]:
    """All that can be got under the key."""
    found = []
    while (arrival := path.get(EDGE, "k")) is not None:
        found.append(int(arrival.open()[0, 0]))
    return found


def facts(path: ArenaTransport) -> dict[str, int]:
    found = path.health().facts
    return {name: found[name] for name in ("discarded", "replaced", "consumed", "expired", "in_flight")}


@SIZES
@pytest.mark.parametrize("how", ["discard", "withdraw"])
def test_it_waits_for_who_looks_and_then_takes_the_message_back(
    ends: tuple[ArenaTransport, ArenaTransport], looker: Looker, nbytes: int, how: str
) -> None:
    sender, receiver = ends
    put(sender, 1, nbytes)
    looker.goes_at = 3
    with looker.at_the_only_message(sender):
        assert sender.discard("k") == 1 if how == "discard" else sender.withdraw(EDGE, "k")
    assert looker.waits == 3
    assert got(receiver) == []
    assert facts(sender) == {"discarded": 1, "replaced": 0, "consumed": 0, "expired": 0, "in_flight": 0}


@SIZES
@pytest.mark.parametrize("how", ["discard", "withdraw"])
def test_what_it_did_not_take_back_can_be_got(
    ends: tuple[ArenaTransport, ArenaTransport], looker: Looker, nbytes: int, how: str
) -> None:
    """Its looker is stopped: after a tenth of a second it says no, and no it is, however often the sender looks."""
    sender, receiver = ends
    put(sender, 1, nbytes)
    began = looker.clock.now
    with looker.at_the_only_message(sender):
        assert not (sender.discard("k") if how == "discard" else sender.withdraw(EDGE, "k"))
        assert sender.reap() == 0
    assert 0 < looker.clock.now - began < 0.2
    assert sender.reap() == 0
    assert facts(sender)["in_flight"] == 1
    assert got(receiver) == [1]
    assert facts(sender) == {"discarded": 0, "replaced": 0, "consumed": 1, "expired": 0, "in_flight": 0}


@SIZES
def test_a_second_put_replaces_what_a_stopped_process_looks_at(
    ends: tuple[ArenaTransport, ArenaTransport], looker: Looker, nbytes: int
) -> None:
    sender, receiver = ends
    put(sender, 1, nbytes)
    with looker.at_the_only_message(sender):
        put(sender, 2, nbytes)
    assert got(receiver) == [2]  # the first is there still, and nobody else is given it
    assert facts(sender) == {"discarded": 1, "replaced": 0, "consumed": 1, "expired": 0, "in_flight": 0}


@SIZES
def test_a_message_that_is_looked_at_when_it_is_late_expires_later(
    ends: tuple[ArenaTransport, ArenaTransport], looker: Looker, nbytes: int
) -> None:
    sender, _ = ends
    put(sender, 1, nbytes)
    looker.clock.now += 61
    with looker.at_the_only_message(sender):
        assert sender.reap() == 0
        assert looker.waits == 0  # there is no hurry
    assert sender.reap() == 1
    assert facts(sender)["expired"] == 1
