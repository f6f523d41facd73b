"""Full pools, full file systems, no descriptors, and messages that nobody gets.

All with real processes, each killed by SIGKILL or stopped at an exact point.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from tests.support.arena import EDGE, KIB, LONG, MIB, FakeClock, pixels, small
from tests.support.arena_faults import IN_POOL, IN_RING, Start, as_root, files
from tests.support.descriptors import nothing_left_open
from tests.support.processes import Processes
from vllm_omni_sched.clock import monotonic_seconds
from vllm_omni_sched.config.errors import MessageTooLargeError, NoRoomError, RendezvousError
from vllm_omni_sched.connectors.arena import ArenaOptions, ArenaTransport, inbox, meeting
from vllm_omni_sched.connectors.arena.transport import BURY_EVERY
from vllm_omni_sched.connectors.framing import ON_DEVICE, make_message


def test_a_full_arena_refuses_and_takes_again_when_something_was_got(start: Start) -> None:
    producer, consumer = start(), start()
    with pytest.raises(NoRoomError, match=r"pool image is full; raise its max_bytes \(1048576\)"):
        producer.put_many(1000, IN_POOL)
    status, reason, facts = producer.health()
    assert status == "sick"
    assert "pool image is full" in reason
    put = facts["put"]
    assert put == facts["in_flight"] == 1 * MIB // (24 * KIB)
    assert facts["pools"]["image"]["capacity_bytes"] == 1 * MIB
    for i in range(put):
        assert consumer.get(f"m{i}") == (IN_POOL, i)
    assert producer.health()[0] == "degraded"
    assert producer.put("k", IN_POOL, 1) == 24 * KIB


def test_a_message_larger_than_its_pool_is_refused_before_its_deadline(options: ArenaOptions) -> None:
    path = ArenaTransport(options, clock=FakeClock(), sleep=lambda _: pytest.fail("waits in vain"))
    with pytest.raises(NoRoomError, match=r"of \d+ bytes on edge 0->1 is larger than pool image may become"):
        path.put(make_message(EDGE, "k", pixels(1, 1 * MIB)), deadline=1e9)
    assert path.health().status.value == "degraded"  # others still get through
    path.close()


@pytest.mark.parametrize("deadline", [None, 1e9])
def test_no_pool_grows_for_a_message_that_never_fits(root: str, deadline: float | None) -> None:
    """The pool grows neither if it exists already, nor for its first message."""
    pool = {"block_bytes": 4 * KIB, "initial_bytes": 64 * KIB, "max_bytes": 4 * MIB, "inline_bytes": 0}
    path = ArenaTransport(small(root, image=pool, audio=pool), sleep=lambda _: pytest.fail("waits in vain"))
    path.put(make_message(EDGE, "k", pixels(1, 40 * KIB)))
    before = path.health().facts["pools"]
    for payload in (pixels(1, 4 * MIB), np.zeros(2 * MIB, np.int16)):
        with pytest.raises(MessageTooLargeError, match="raise its max_bytes"):
            path.put(make_message(EDGE, "large", payload), deadline)
    assert path.health().facts["pools"] == before
    assert not list(path.directory.glob("*.3.pool"))
    path.close()


def test_no_pool_grows_where_what_it_holds_lies_in_the_way(root: str) -> None:
    """Of 96 MB, those from 20 to 40 are in use: 60 MB have no room until they go, however far the pool grows."""
    pool = {"block_bytes": 4 * KIB, "initial_bytes": 64 * KIB, "max_bytes": 96 * MIB, "inline_bytes": 0}
    path = ArenaTransport(small(root, image=pool))
    for key in ("a", "b"):
        path.put(make_message(EDGE, key, pixels(1, 20 * MIB - 4 * KIB)))
    assert path.discard("a") == 1
    capacity = path.health().facts["pools"]["image"]["capacity_bytes"]
    assert capacity < 96 * MIB
    with pytest.raises(NoRoomError, match="pool image is full"):
        path.put(make_message(EDGE, "large", pixels(1, 60 * MIB)))
    assert path.health().facts["pools"]["image"]["capacity_bytes"] == capacity
    assert path.discard("b") == 1
    assert path.put(make_message(EDGE, "large", pixels(1, 60 * MIB))) > 60 * MIB
    path.close()


def test_what_lies_on_a_device_is_not_let_through_as_if_the_ring_would_take_it(root: str) -> None:
    """Such a message is leased, so it goes through a pool, which is smaller than the ring here."""
    pool = {"block_bytes": 64, "initial_bytes": 64 * KIB, "max_bytes": 64 * KIB, "inline_bytes": MIB}
    path = ArenaTransport(small(root, ring_bytes=MIB, text=pool, image=pool, audio=pool))
    message = make_message(EDGE, "k", pixels(1, 100 * KIB))
    message.flags |= ON_DEVICE
    with pytest.raises(MessageTooLargeError):
        path.put(message, deadline=monotonic_seconds() + LONG)
    assert path.health().facts["pools"] == {}
    path.close()


@as_root
@pytest.mark.parametrize("option", ["nothing", "ring", "pool", "growth"])
def test_a_full_file_system_is_a_clean_error(all_processes: Processes, root: str, option: str) -> None:
    """A tmpfs of 2 MB that only the process sees. Never SIGBUS: memory is set aside before it is written to."""
    process = all_processes.start()
    try:
        process.own_mount(root, 2 * MIB)
    except OSError as error:
        pytest.skip(str(error))
    larger = {"block_bytes": 4 * KIB, "initial_bytes": 64 * KIB, "max_bytes": 64 * MIB, "inline_bytes": 1 * KIB}
    process.open(small(root, image=larger).model_dump())
    if option == "ring":
        process.fill(f"{root}/full", process.free_bytes(root))
        with pytest.raises(NoRoomError, match=r"no memory for an outbox .*No space left on device.*shm-size"):
            process.put("k", IN_RING, 1)
        assert process.get("k") is None  # an empty file needs no room
        process.remove(f"{root}/full")
        assert process.put("k", IN_RING, 1) > 0
    elif option == "pool":
        process.put("small", IN_RING, 1)
        process.fill(f"{root}/full", process.free_bytes(root))
        with pytest.raises(NoRoomError, match=r"pool image cannot grow \(No space left on device\); give"):
            process.put("k", IN_POOL, 1)
        assert process.health()[0] == "sick"
        assert process.get("small") == (IN_RING, 1)
        process.remove(f"{root}/full")
    elif option == "growth":  # the last of the memory is used, though less than a whole step of growth is left
        process.put("k", IN_POOL, 1)
        with pytest.raises(NoRoomError, match="No space left on device"):
            process.put_many(1000, 200 * KIB)
        assert process.free_bytes(root) < 300 * KIB
        assert process.get("m0") == (200 * KIB, 0)
        assert process.get("k") == (IN_POOL, 1)
    assert process.put("k", IN_POOL, 1) > 0
    assert process.get("k") == (IN_POOL, 1)
    process.kill()


def test_ten_thousand_messages_that_nobody_gets(root: str) -> None:
    """Bounded, told by `health`, and gone when they have expired."""
    clock = FakeClock()
    path = ArenaTransport(small(root, ring_bytes=4 * MIB, max_messages=16384, ttl_seconds=60), clock=clock)
    for i in range(10_000):
        path.put(make_message(EDGE, f"{i}", i))
        clock.now += 0.001
    facts = path.health().facts
    assert (facts["in_flight"], facts["expired"]) == (10_000, 0)
    clock.now += 55
    health = path.health()
    assert health.status.value == "degraded"
    assert health.facts["expired"] == pytest.approx(5000, abs=2)
    clock.now += 10
    facts = path.health().facts
    assert (facts["in_flight"], facts["expired"], facts["ring"]["used_bytes"]) == (0, 10_000, 0)
    clock.now += 61
    assert path.health().status.value == "healthy"  # it speaks of what happened lately
    path.close()


def test_three_thousand_messages_and_an_index_of_a_thousand(root: str) -> None:
    path, refused = ArenaTransport(small(root, ring_bytes=4 * MIB, max_messages=1024)), 0
    for i in range(3000):
        try:
            path.put(make_message(EDGE, f"{i}", i))
        except NoRoomError as error:
            assert "the index is full; raise max_messages (1024)" in str(error)  # noqa: PT017
            refused += 1
    facts = path.health().facts
    assert facts["in_flight"] + refused == 3000
    assert 900 < facts["in_flight"] <= 1024
    path.close()


def test_ten_thousand_messages_that_are_held(root: str) -> None:
    """A put looks at eight messages, however many are held; and asks once whether their holder lives."""
    pool = {"block_bytes": 64, "initial_bytes": 1 * MIB, "max_bytes": 8 * MIB, "inline_bytes": 0}
    path = ArenaTransport(small(root, text=pool, image=pool, max_messages=16384))
    held = []
    for i in range(10_000):
        path.put(make_message(EDGE, f"{i}", pixels(1, 8)))
        held.append(path.get(EDGE, f"{i}"))
    asked: list[Path] = []
    real = meeting.is_alive
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meeting, "is_alive", lambda path: asked.append(path) or real(path))
        assert path.reap() == 0
        for i in range(100):
            path.put(make_message(EDGE, f"more {i}", pixels(1, 8)))
    assert len(set(asked)) == 1
    assert len(asked) < 60
    held.clear()
    assert path.reap() == 10_000
    path.close()


def test_a_receiver_without_descriptors_or_memory_can_get_a_message_later(
    options: ArenaOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    clock = FakeClock()
    sender, receiver = ArenaTransport(options, clock=clock), ArenaTransport(options, clock=clock)
    sender.put(make_message(EDGE, "k", pixels(1, IN_POOL)))
    real = inbox.open_private
    for works in (lambda path: path.suffix == meeting.OUTBOX, lambda path: False):
        for room in (inbox, inbox):
            monkeypatch.setattr(room, "open_private", lambda path, works=works: real(path) if works(path) else fails())
        with pytest.raises(RendezvousError, match=r"cannot search for messages in .*: Too many open files"):
            receiver.get(EDGE, "k")
        clock.now += 0.2  # after which time stamps are believed
    for room in (inbox, inbox):
        monkeypatch.setattr(room, "open_private", real)
    monkeypatch.setattr(inbox, "Memory", fails)
    with pytest.raises(RendezvousError, match="Too many open files"):
        receiver.get(EDGE, "k")
    monkeypatch.undo()
    arrival = receiver.get(EDGE, "k")
    assert arrival is not None
    assert arrival.open()[0, 0] == 1
    del arrival
    sender.close()
    receiver.close()


@pytest.mark.parametrize("what", ["mmap.mmap", "os.ftruncate", "pathlib.Path.rename"])
def test_what_cannot_be_made_leaves_nothing_half_made(
    options: ArenaOptions, directory: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    path = ArenaTransport(options)
    if what == "os.ftruncate":
        path.put(make_message(EDGE, "small", 1))
    there, refused = files(directory), r"no memory for (an outbox|a pool) in .* \(Cannot allocate memory\)"
    with nothing_left_open():
        for _ in range(3):
            with monkeypatch.context() as patch:
                patch.setattr(what, fails)
                with pytest.raises(NoRoomError, match=refused):
                    path.put(make_message(EDGE, "k", pixels(1, IN_POOL)))
            assert files(directory) == there
    assert path.put(make_message(EDGE, "k", pixels(1, IN_POOL))) > 0
    path.close()


def test_an_inbox_that_cannot_be_made_leaves_nothing(
    options: ArenaOptions, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    path = ArenaTransport(options)
    for what in ("pathlib.Path.rename", "fcntl.flock"):
        with monkeypatch.context() as patch:
            patch.setattr(what, fails)
            with pytest.raises(RendezvousError, match="Too many open files"):
                path.get(EDGE, "k")
    assert files(directory) == []
    path.close()


def test_health_looks_after_the_dead_where_nobody_asks_for_messages(start: Start, options: ArenaOptions) -> None:
    clock, producer = FakeClock(), start()
    producer.put("k", IN_POOL, 1)
    receiver = ArenaTransport(options, clock=clock)
    assert receiver.get(EDGE, "k") is not None
    producer.kill()
    assert receiver.health().facts["senders"] == 1
    clock.now += BURY_EVERY + 1
    assert receiver.health().facts["senders"] == 0
    receiver.close()
