"""Clocks that jump, forks, and two paths in one process.

All with real processes, each killed by SIGKILL or stopped at an exact point.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.arena import EDGE, FakeClock, pixels, small
from tests.support.arena_faults import IN_POOL, Start
from vllm_omni_sched.config.errors import TransportClosedError
from vllm_omni_sched.connectors.arena import ArenaTransport, inbox
from vllm_omni_sched.connectors.arena.transport import BURY_EVERY
from vllm_omni_sched.connectors.framing import make_message


def test_clocks_that_jump(root: str) -> None:
    """One clock, handed in, is all the arena reads: `clock.monotonic_seconds`, the same for all processes of a host."""
    clock = FakeClock()
    sender = ArenaTransport(small(root, ttl_seconds=60), clock=clock)
    receiver = ArenaTransport(small(root, ttl_seconds=60), clock=clock)
    sender.put(make_message(EDGE, "a", 1))
    clock.now -= 900  # back: nothing expires, nothing raises
    assert sender.reap() == 0
    sender.put(make_message(EDGE, "b", pixels(1, IN_POOL)))
    arrival = receiver.get(EDGE, "b")
    assert arrival is not None
    clock.now += 5000  # far ahead: what nobody has got expires, what is held does not
    assert sender.reap() == 1
    assert receiver.get(EDGE, "a") is None
    assert arrival.open()[0, 0] == 1
    del arrival
    assert sender.reap() == 1
    late = ArenaTransport(small(root, ttl_seconds=60), clock=clock)
    late.put(make_message(EDGE, "c", 1))
    assert receiver.get(EDGE, "c") is not None
    for path in (sender, receiver, late):
        path.close()


def test_a_clock_that_jumps_while_a_new_sender_comes(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time stamps of a directory are no proof for ever: receivers look again when they bury."""
    monkeypatch.setattr(inbox, "NEW_SENDERS_AFTER", -1.0)  # of real time, of which none may have passed here
    clock = FakeClock()
    receiver = ArenaTransport(small(root), clock=clock)
    assert receiver.get(EDGE, "k") is None
    stamp = os.stat(receiver.directory)
    sender = ArenaTransport(small(root), clock=clock)
    sender.put(make_message(EDGE, "k", 1))
    os.utime(receiver.directory, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # as if within the same tick
    clock.now += 1
    assert receiver.get(EDGE, "k") is None
    clock.now += BURY_EVERY
    assert receiver.get(EDGE, "k") is not None
    sender.close()
    receiver.close()


def test_a_forked_child_does_not_keep_its_parent_alive(start: Start, directory: Path) -> None:
    parent, producer, consumer = start(), start(), start()
    producer.put("k", IN_POOL, 1)
    parent.put("mine", IN_POOL, 2)
    assert parent.get("k", hold=True) == (IN_POOL, 1)
    child = parent.fork()
    try:
        parent.kill()
        producer.reap()
        assert consumer.get("k") == (IN_POOL, 1)
        assert consumer.get("mine") == (IN_POOL, 2)
        assert consumer.bury() == 1
        producer.close()
        consumer.close()
        assert not directory.exists()
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_forked_child_inherits_nothing(start: Start) -> None:
    """The child inherits neither the transport nor the right to end its parent's leases."""
    parent, producer = start(), start()
    producer.put("k", IN_POOL, 1)
    parent.get("k", hold=True)
    parent.put("a", IN_POOL, 2)
    said = parent.fork_and_use()
    assert said == [
        f"{TransportClosedError.__name__}: the arena was closed by a fork, for the child, before this put",
        f"{TransportClosedError.__name__}: the arena was closed by a fork, for the child, before this get",
        "0",
        "closed",
    ]
    assert producer.reap() == 0
    assert parent.look("k") == 1
    assert parent.get("a") == (IN_POOL, 2)
    parent.drop("k")
    assert producer.reap() == 1
    assert producer.get("none") is None
    assert producer.bury() == 0


def test_two_paths_in_one_process(root: str) -> None:
    """As in a stage of vLLM-Omni, where engine core and worker each have one."""
    one, two = ArenaTransport(small(root)), ArenaTransport(small(root))
    for sender, receiver in ((one, two), (two, one), (one, one)):
        sender.put(make_message(EDGE, "k", pixels(1, IN_POOL)))
        arrival = receiver.get(EDGE, "k")
        assert arrival is not None
        del arrival
        assert sender.reap() == 1
    two.put(make_message(EDGE, "k", 1))
    two.close()
    assert one.get(EDGE, "k") is not None
    assert one.directory.exists()
    one.close()
    assert not one.directory.exists()
