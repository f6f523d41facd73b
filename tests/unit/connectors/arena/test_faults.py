"""What becomes of messages, memory and files when processes are killed, files damaged, and the host full.

All with real processes, each killed by SIGKILL at an exact point.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.arena import EDGE, KIB, MIB, FakeClock, Process, Processes, pixels, place, small
from vllm_omni_sched.connectors.arena import ArenaOptions, ArenaPath, inbox, layout, meeting
from vllm_omni_sched.connectors.arena.layout import Layout
from vllm_omni_sched.connectors.arena.path import BURY_EVERY
from vllm_omni_sched.connectors.framing import make_message
from vllm_omni_sched.errors import CorruptMessageError, NoRoomError, PathClosedError, RendezvousError

ARENA = "vllm_omni_sched.connectors.arena"
IN_RING, IN_POOL = 100, 20 * KIB
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: another user, or a mount of one's own")


@pytest.fixture(scope="module")
def all_processes() -> Iterator[Processes]:
    processes = Processes()
    yield processes
    processes.close()


@pytest.fixture
def root(all_processes: Processes) -> Iterator[str]:
    with place() as root:
        yield root
        all_processes.end()


@pytest.fixture
def options(root: str) -> ArenaOptions:
    return small(root)


@pytest.fixture
def start(all_processes: Processes, options: ArenaOptions) -> Callable[..., Process]:
    return lambda ahead=0.0, options=options: all_processes.open(options, ahead)


@pytest.fixture
def directory(root: str) -> Path:
    return Path(root) / f"vllm-omni-sched-{os.geteuid()}" / "a"


Start = Callable[..., Process]


def files(directory: Path) -> list[str]:
    """Kinds of files in the arena."""
    return sorted(path.suffix for path in directory.iterdir())


# -- the producer is killed


@pytest.mark.parametrize("nbytes", [IN_RING, IN_POOL])
@pytest.mark.parametrize("where", ["outbox:Outbox._room_for", "index:Index.publish", "layout:Layout.digest_at"])
def test_a_producer_killed_before_its_message_is_shown_has_put_nothing(
    start: Start, directory: Path, nbytes: int, where: str
) -> None:
    producer, consumer = start(), start()
    producer.put("before", nbytes, 1)
    producer.die_at(f"{ARENA}.{where}")
    producer.dies("put", "k", nbytes, 2)
    assert consumer.get("k") is None
    assert consumer.get("before") == (nbytes, 1)
    assert consumer.bury() == 1
    assert files(directory) == [".in"]


@pytest.mark.parametrize("nbytes", [IN_RING, IN_POOL])
def test_a_producer_killed_while_it_writes_has_put_nothing(start: Start, directory: Path, nbytes: int) -> None:
    producer, consumer = start(), start()
    producer.dies("die_halfway_through", "k", nbytes)
    assert consumer.get("k") is None
    assert consumer.bury() == 1
    assert files(directory) == [".in"]


@pytest.mark.parametrize("nbytes", [IN_RING, IN_POOL])
def test_what_a_producer_has_put_outlives_it(start: Start, directory: Path, nbytes: int) -> None:
    producer, consumer = start(), start()
    producer.put("a", nbytes, 1)
    producer.die_at(f"{ARENA}.index:Index.publish", after=True)
    producer.dies("put", "b", nbytes, 2)
    assert [consumer.get("a"), consumer.get("b", hold=True)] == [(nbytes, 1), (nbytes, 2)]
    if nbytes == IN_POOL:
        assert consumer.bury() == 0  # it is looked at
        assert consumer.look("b") == 2
    consumer.drop("b")
    assert consumer.bury() == 1
    assert files(directory) == [".in"]


def test_a_producer_killed_with_the_lock_of_a_slot_holds_nobody_up(start: Start) -> None:
    producer, consumer = start(), start()
    for key in ("a", "b"):
        producer.put(key, IN_POOL, 1)
    producer.die_at(f"{ARENA}.index:Index.free")
    producer.dies("discard", "a")
    assert [consumer.get("a"), consumer.get("b")] == [(IN_POOL, 1)] * 2


def test_a_producer_killed_while_it_makes_its_outbox_leaves_nothing_for_long(start: Start, directory: Path) -> None:
    producer, consumer = start(), start()
    assert consumer.get("k") is None
    producer.die_at("pathlib:Path.rename")
    producer.dies("put", "k", IN_RING, 1)
    assert files(directory) == [".in", ".new"]
    consumer.bury()
    assert files(directory) == [".in", ".new"]  # it might be somebody alive
    (unfinished,) = directory.glob("*.new")
    past = unfinished.stat().st_mtime - 2 * meeting.UNFINISHED_FOR
    os.utime(unfinished, (past, past))
    consumer.bury()
    assert files(directory) == [".in"]


def test_twenty_producers_one_after_the_other(start: Start, directory: Path) -> None:
    """Receivers forget those that are gone: no mapping, no file stays, whether they were killed or closed."""
    consumer = start()
    for i in range(20):
        producer = start()
        producer.put("k", IN_POOL, i)
        assert consumer.get("k") == (IN_POOL, i)
        if i % 2:
            producer.close()
        producer.kill()
        assert consumer.bury() == 1
        assert consumer.health()[2]["senders"] == 0
    assert files(directory) == [".in"]
    with open(f"/proc/{consumer.pid}/maps") as maps:
        assert str(directory) not in maps.read()
    assert not [fd for fd in Path(f"/proc/{consumer.pid}/fd").iterdir() if ".out" in os.readlink(fd)]


def test_a_producer_that_closes_leaves_its_messages_and_then_nothing(start: Start, directory: Path) -> None:
    producer, consumer = start(), start()
    for key in "abc":
        producer.put(key, IN_POOL, 3)
    assert consumer.get("a", hold=True) == (IN_POOL, 3)
    producer.close()
    assert consumer.get("b") == (IN_POOL, 3)
    assert consumer.bury() == 0
    assert consumer.get("c") == (IN_POOL, 3)
    assert consumer.look("a") == 3
    consumer.drop("a")
    assert consumer.bury() == 1
    assert files(directory) == [".in"]


def test_messages_of_a_dead_producer_expire(start: Start, options: ArenaOptions, directory: Path) -> None:
    producer = start()
    producer.put_many(50, IN_RING)
    late = start(options.ttl_seconds + 1)
    assert late.get("none") is None
    assert late.bury() == 0  # who put them lives, and sees to it
    producer.kill()
    soon = start()
    assert soon.get("m7") == (IN_RING, 7)
    assert soon.bury() == 0
    assert late.bury() == 1
    assert late.get("m8") is None
    status, reason, facts = late.health()
    assert (status, reason, facts["orphans_expired"]) == ("degraded", "49 orphans_expired", 49)
    assert soon.bury() == 1
    assert files(directory) == [".in", ".in"]


def test_a_process_that_was_stopped_with_the_lock_of_a_slot_holds_nobody_up(start: Start) -> None:
    producer, consumer, other = start(), start(), start()
    for key in "ab":
        producer.put(key, IN_POOL, 1)
    consumer.die_at(f"{ARENA}.index:Index.claim", by=signal.SIGSTOP)  # it has seen it, and not yet taken it
    consumer.stops("get", "a")
    assert other.get("a") == (IN_POOL, 1)
    assert consumer.goes_on() is None
    consumer.die_at(f"{ARENA}.memory:ByteLocks.acquire", after=True, by=signal.SIGSTOP)
    consumer.stops("get", "b")
    assert other.get("b") is None
    assert producer.discard("b") == 0
    producer.put("b", IN_POOL, 2)
    assert other.get("b") == (IN_POOL, 2)
    assert consumer.goes_on() == (IN_POOL, 1)


# -- the consumer is killed


@pytest.mark.parametrize("nbytes", [IN_RING, IN_POOL])
@pytest.mark.parametrize(
    ("where", "after"),
    [
        (f"{ARENA}.index:Index.claim", False),
        (f"{ARENA}.index:Index.claim", True),
        (f"{ARENA}.inbox:_Sender.region", False),
        (f"{ARENA}.inbox:Arrival", False),
        (f"{ARENA}.inbox:Arrival", True),
        (f"{ARENA}.index:Index.consume", False),
    ],
)
def test_a_consumer_killed_in_get_gives_its_message_back(start: Start, nbytes: int, where: str, after: bool) -> None:
    producer, consumer = start(), start()
    producer.put("k", nbytes, 9)
    consumer.die_at(where, after)
    if nbytes == IN_POOL and "consume" in where:
        consumer.get("k", hold=True)
        consumer.dies("drop", "k")
    else:
        consumer.dies("get", "k")
    producer.reap()
    again = start()
    assert again.get("k") == (nbytes, 9)
    assert again.get("k") is None
    producer.reap()
    assert producer.health()[2]["in_flight"] == 0


@pytest.mark.parametrize("state", [layout.State.LEASED, layout.State.CONSUMED])
def test_a_consumer_killed_between_two_writes_to_the_index(start: Start, state: int) -> None:
    producer, consumer = start(), start()
    producer.put("k", IN_RING, 9)
    consumer.die_at_state(state)
    consumer.dies("get", "k")
    producer.reap()
    assert start().get("k") == (IN_RING, 9)


def test_a_consumer_killed_while_it_holds_a_view(start: Start, directory: Path) -> None:
    producer, consumer = start(), start()
    for i in range(5):
        producer.put(f"{i}", IN_POOL, i)
        assert consumer.get(f"{i}", hold=True) == (IN_POOL, i)
    assert producer.reap() == 0
    consumer.kill()
    assert producer.reap() == 0
    status, reason, facts = producer.health()
    assert (status, reason, facts["in_flight"]) == ("degraded", "5 given_back", 5)
    again = start()
    for i in range(5):
        assert again.get(f"{i}") == (IN_POOL, i)
    assert producer.reap() == 5
    again.bury()
    assert files(directory) == [".in", ".out", ".pool"]  # the inbox of the dead has gone


@pytest.mark.parametrize("what", ["discarded", "replaced"])
def test_what_its_sender_took_back_does_not_return_from_the_dead(start: Start, what: str) -> None:
    producer, consumer = start(), start()
    producer.put("k", IN_POOL, 1)
    consumer.get("k", hold=True)
    if what == "discarded":
        assert producer.discard("k") == 0
    else:
        producer.put("k", IN_POOL, 2)
    assert consumer.look("k") == 1
    consumer.kill()
    producer.reap()
    again = start()
    assert again.get("k") == (None if what == "discarded" else (IN_POOL, 2))
    assert again.get("k") is None
    producer.reap()
    facts = producer.health()[2]
    assert facts["in_flight"] == 0
    assert facts["put"] == facts["consumed"] + facts["discarded"]


def test_a_view_outlives_the_close_of_its_path_but_not_its_process(start: Start) -> None:
    producer, consumer, other = start(), start(), start()
    for key in "ab":
        producer.put(key, IN_POOL, 4)
        consumer.get(key, hold=True)
    consumer.close()
    producer.reap()
    assert other.get("a") is None
    producer.put_many(30, IN_POOL)
    assert consumer.look("a") == 4
    consumer.drop("a")
    producer.reap()
    facts = producer.health()[2]
    assert (facts["consumed"], facts["in_flight"]) == (1, 31)
    consumer.kill()
    producer.reap()
    assert other.get("b") == (IN_POOL, 4)


@pytest.mark.parametrize("nbytes", [IN_RING, IN_POOL])
def test_both_are_killed_and_start_again_under_the_same_name(start: Start, directory: Path, nbytes: int) -> None:
    producer, consumer = start(), start()
    for i in range(6):
        producer.put(f"{i}", nbytes, i)
    assert consumer.get("0") == (nbytes, 0)
    consumer.die_at(f"{ARENA}.index:Index.claim", after=True)
    consumer.dies("get", "1")
    producer.kill()
    producer, consumer = start(), start()
    producer.put("5", nbytes, 50)
    producer.put("new", nbytes, 60)
    assert consumer.get("new") == (nbytes, 60)
    assert consumer.get("1") is None
    assert consumer.bury() == 0
    assert consumer.health()[2]["orphans_given_back"] == 1
    assert [consumer.get(f"{i}") for i in (1, 2, 3, 4)] == [(nbytes, i) for i in (1, 2, 3, 4)]
    assert {consumer.get("5"), consumer.get("5")} == {(nbytes, 5), (nbytes, 50)}  # one of each sender
    assert consumer.bury() == 1
    producer.close()
    consumer.bury()
    assert files(directory) == [".in"]


def test_the_next_arena_takes_away_what_one_left_whose_processes_were_all_killed(
    start: Start, root: str, directory: Path
) -> None:
    for process in (start(), start()):
        process.put_many(3, IN_POOL)
        process.get("m1", hold=True)
        process.kill()
    assert len(files(directory)) == 6
    other = start(options=small(root, arena="b"))
    assert not directory.exists()
    other.close()
    assert os.listdir(root) == []


# -- many at once


def test_three_receivers_ask_for_the_same_messages_at_the_same_time(start: Start) -> None:
    """400 messages: each is got, whole, by one of them."""
    sender, receivers = start(), [start() for _ in range(3)]
    for number, receiver in enumerate(receivers):
        receiver.begin("receive_all", 400, number)
    sender.send_all(400, 3)
    assert sorted(i for receiver in receivers for i in receiver.result()) == list(range(400))
    for receiver in receivers:
        receiver.close()
    assert sender.health()[2]["in_flight"] == 0


def test_processes_come_and_go_at_the_same_time(
    all_processes: Processes, options: ArenaOptions, root: str, directory: Path
) -> None:
    """Three, 100 times each: the last one takes the arena away, and nobody is left in one that was."""
    processes = [all_processes.start() for _ in range(3)]
    for process in processes:
        process.begin("come_and_go", options.model_dump(), 100)
    assert [process.result() for process in processes] == [100] * 3
    assert os.listdir(root) == []


@pytest.mark.parametrize("made_again", [False, True])
def test_an_arena_that_goes_while_somebody_enters(
    options: ArenaOptions, directory: Path, made_again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fcntl.flock

    def flock(fd: int, how: int) -> None:
        monkeypatch.undo()
        directory.rmdir()
        if made_again:
            directory.mkdir(mode=0o700)
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    path = ArenaPath(options)
    assert os.path.samestat(os.fstat(path._entered), directory.stat())
    path.put(make_message(EDGE, "k", 1))
    assert path.get(EDGE, "k") is not None
    path.close()


@pytest.mark.parametrize("seed", range(3))
def test_random_kills(start: Start, directory: Path, seed: int) -> None:
    """200 steps: whatever dies, each message is got by one that lives, and by one only."""
    dice = random.Random(seed)
    senders, receivers = [start(), start()], [start(), start()]
    waiting: dict[str, tuple[int, int]] = {}
    held: list[dict[str, tuple[int, int]]] = [{}, {}]
    kills = 0

    def settle() -> None:
        for sender in senders:
            sender.reap()
        for receiver in receivers:
            receiver.get("none")  # so that it knows all senders
            receiver.bury()

    for step in range(200):
        which = dice.randrange(2)
        act = dice.choices(["put", "get", "drop", "again", "kill receiver", "kill sender"], [40, 40, 15, 10, 4, 4])[0]
        if act == "put":
            nbytes = dice.choice([IN_RING, IN_POOL])
            try:
                senders[which].put(f"{step}", nbytes, step)
                waiting[f"{step}"] = nbytes, step
            except NoRoomError:
                continue
        elif act == "get" and waiting:
            key = dice.choice(sorted(waiting))
            hold = dice.random() < 0.5
            assert receivers[which].get(key, hold=hold) == waiting[key]
            if hold and waiting[key][0] == IN_POOL:
                held[which][key] = waiting[key]
            del waiting[key]
        elif act == "drop" and held[which]:
            key = dice.choice(sorted(held[which]))
            assert receivers[which].look(key) == held[which].pop(key)[1]
            receivers[which].drop(key)
        elif act == "again" and held[which]:
            assert receivers[1 - which].get(dice.choice(sorted(held[which]))) is None
        elif act == "kill receiver":
            receivers[which].kill()
            receivers[which] = start()
            waiting |= held[which]
            held[which] = {}
            settle()
            kills += 1
        elif act == "kill sender":
            senders[which].kill()
            senders[which] = start()
            kills += 1
    for key, found in waiting.items():
        assert receivers[dice.randrange(2)].get(key) == found
    for receiver, keys in zip(receivers, held, strict=True):
        for key in keys:
            assert receiver.look(key) == keys[key][1]
            receiver.drop(key)
    settle()
    assert [sender.health()[2].get("in_flight", 0) for sender in senders] == [0, 0]
    assert len(files(directory)) <= 2 + 2 * 2  # two inboxes, and outbox and pool of the senders that live
    assert kills > 5


# -- there is no room


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
    path = ArenaPath(options, clock=FakeClock(), sleep=lambda _: pytest.fail("waits in vain"))
    with pytest.raises(NoRoomError, match=r"of \d+ bytes on edge 0->1 is larger than pool image may get"):
        path.put(make_message(EDGE, "k", pixels(1, 1 * MIB)), deadline=1e9)
    assert path.health().status.value == "degraded"  # others still get through
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
    path = ArenaPath(small(root, ring_bytes=4 * MIB, max_messages=16384, ttl_seconds=60), clock=clock)
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
    path, refused = ArenaPath(small(root, ring_bytes=4 * MIB, max_messages=1024)), 0
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
    path = ArenaPath(small(root, text=pool, image=pool, max_messages=16384))
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
    sender, receiver = ArenaPath(options, clock=clock), ArenaPath(options, clock=clock)
    sender.put(make_message(EDGE, "k", pixels(1, IN_POOL)))
    real = inbox.open_private
    for works in (lambda path: path.suffix == meeting.OUTBOX, lambda path: False):
        monkeypatch.setattr(inbox, "open_private", lambda path, works=works: real(path) if works(path) else fails())
        with pytest.raises(RendezvousError, match=r"cannot look for messages in .*: Too many open files"):
            receiver.get(EDGE, "k")
        clock.now += 0.2  # after which time stamps are believed
    monkeypatch.setattr(inbox, "open_private", real)
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

    path = ArenaPath(options)
    if what == "os.ftruncate":
        path.put(make_message(EDGE, "small", 1))
    descriptors, there = os.listdir("/proc/self/fd"), files(directory)
    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(what, fails)
            with pytest.raises(NoRoomError, match=r"no memory for (an outbox|a pool) in .* \(Cannot allocate memory\)"):
                path.put(make_message(EDGE, "k", pixels(1, IN_POOL)))
        assert len(os.listdir("/proc/self/fd")) == len(descriptors)
        assert files(directory) == there
    assert path.put(make_message(EDGE, "k", pixels(1, IN_POOL))) > 0
    path.close()


def test_an_inbox_that_cannot_be_made_leaves_nothing(
    options: ArenaOptions, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    path = ArenaPath(options)
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
    receiver = ArenaPath(options, clock=clock)
    assert receiver.get(EDGE, "k") is not None
    producer.kill()
    assert receiver.health().facts["senders"] == 1
    clock.now += BURY_EVERY + 1
    assert receiver.health().facts["senders"] == 0
    receiver.close()


# -- files are damaged, foreign, or another's


HEAD_DAMAGE = {
    "magic": lambda head: b"otherone" + head[8:],
    "version": lambda head: head[:8] + struct.pack("<I", 99) + head[12:],
    "slots": lambda head: head[:12] + struct.pack("<I", 1 << 30) + head[16:],
    "no slots": lambda head: head[:12] + bytes(4) + head[16:],
    "ring": lambda head: head[:24] + struct.pack("<Q", 1 << 40) + head[32:],
    "zero": lambda head: bytes(len(head)),
}


@pytest.mark.parametrize("damage", HEAD_DAMAGE)
def test_an_outbox_with_a_damaged_head_is_left_alone(start: Start, directory: Path, damage: str) -> None:
    producer, other, consumer = start(), start(), start()
    producer.put("k", IN_RING, 1)
    (outbox,) = directory.glob("*.out")
    with open(outbox, "r+b") as file:
        head = file.read(layout.HEAD.size)
        file.seek(0)
        file.write(HEAD_DAMAGE[damage](head))
    other.put("l", IN_RING, 2)
    assert consumer.get("k") is None
    assert consumer.get("l") == (IN_RING, 2)
    assert consumer.get("m") is None
    assert consumer.health()[:2] == ("degraded", "1 foreign")


@pytest.mark.parametrize("kept", [0, 10, 4096, 8192, 100_000, -1])
def test_an_outbox_that_was_cut_is_left_alone(start: Start, directory: Path, kept: int) -> None:
    producer, other, consumer = start(), start(), start()
    producer.put("k", IN_RING, 1)
    (outbox,) = directory.glob("*.out")
    os.truncate(outbox, kept if kept >= 0 else outbox.stat().st_size - 1)
    other.put("l", IN_RING, 2)
    assert consumer.get("l") == (IN_RING, 2)
    assert consumer.get("k") is None
    assert consumer.health()[1] == "1 foreign"
    producer.kill()


@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize("kept", [0, 4096])
def test_a_pool_that_was_cut_is_a_corrupt_message(start: Start, directory: Path, kept: int, seen: bool) -> None:
    producer, consumer = start(), start()
    for i in range(3):
        producer.put(f"{i}", IN_POOL, i)
    if seen:
        assert consumer.get("0") == (IN_POOL, 0)
    (pool,) = directory.glob("*.pool")
    os.truncate(pool, kept)
    with pytest.raises(CorruptMessageError, match="a message is said to lie"):
        consumer.get("1")
    assert consumer.get("1") is None  # dropped
    assert consumer.health()[1] == "1 corrupt"
    producer.kill()


def test_a_pool_that_was_removed_is_a_corrupt_message(start: Start, directory: Path) -> None:
    producer, consumer = start(), start()
    producer.put("k", IN_POOL, 1)
    (pool,) = directory.glob("*.pool")
    pool.unlink()
    with pytest.raises(CorruptMessageError, match="a pool that is not there"):
        consumer.get("k")
    assert consumer.get("k") is None


RECORD_DAMAGE = {
    "generation": (4, struct.pack("<I", 77), "of generation 1 lies where generation 77 should be"),
    "pool": (8, struct.pack("<I", 3), "a pool that is not there"),
    "offset": (16, struct.pack("<Q", 4096), "not a message"),
    "far offset": (16, struct.pack("<Q", 1 << 62), "outside its outbox"),
    "bytes": (24, struct.pack("<Q", 1 << 62), "outside its outbox"),
    "no bytes": (24, bytes(8), "outside its outbox"),
    "few bytes": (24, struct.pack("<Q", 10), "shorter than its header"),
    "fewer bytes": (24, struct.pack("<Q", IN_RING), "here are"),
}


@pytest.mark.parametrize("nbytes", [IN_RING, IN_POOL])
@pytest.mark.parametrize("damage", RECORD_DAMAGE)
def test_a_damaged_index_is_a_corrupt_message(start: Start, directory: Path, damage: str, nbytes: int) -> None:
    at, written, what = RECORD_DAMAGE[damage]
    producer, consumer = start(), start()
    producer.put("k", nbytes, 1)
    _write_to_record(directory, layout.State.READY, at, written)
    with pytest.raises(CorruptMessageError, match=what):
        consumer.get("k")
    assert consumer.get("k") is None
    assert producer.reap() == 1
    producer.put("k", nbytes, 2)
    assert consumer.get("k") == (nbytes, 2)


@pytest.mark.parametrize("state", [0, 4, 0xFFFFFFFF])
def test_a_sender_whose_index_was_damaged_gets_its_room_back_and_says_so(
    start: Start, directory: Path, state: int
) -> None:
    producer = start()
    producer.put("k", IN_POOL, 1)
    _write_to_record(directory, layout.State.READY, 0, struct.pack("<I", state))
    producer.put("l", IN_POOL, 1)
    _, reason, facts = producer.health()
    assert (reason, facts["in_flight"]) == ("1 damaged", 1)


def test_a_damaged_message_is_a_corrupt_message(start: Start, directory: Path) -> None:
    producer, consumer = start(), start()
    for key in "ab":
        producer.put(key, IN_POOL, 1)
    (pool,) = directory.glob("*.pool")
    with open(pool, "r+b") as file:
        file.seek(70)
        file.write(b"\xff")
    with pytest.raises(CorruptMessageError, match="checksum"):
        consumer.get("a")
    assert [consumer.get("a"), consumer.get("b")] == [None, (IN_POOL, 1)]


@pytest.mark.parametrize("by_the_same", [False, True])
def test_a_block_that_is_used_again_is_never_taken_for_the_old_one(
    start: Start, directory: Path, by_the_same: bool
) -> None:
    """The holder is taken for dead, as if somebody had removed its file; then its lease ends, too late."""
    producer, consumer, other = start(), start(), start()
    producer.put("k", IN_POOL, 1)
    consumer.get("k", hold=True)
    (inbox,) = directory.glob("*.in")
    inbox.rename(inbox.with_suffix(".away"))
    assert consumer.bury() == 0
    producer.reap()
    assert other.get("k") == (IN_POOL, 1)
    producer.reap()
    inbox.with_suffix(".away").rename(inbox)
    producer.put("k", IN_POOL, 2)  # in the same block and slot
    second = consumer if by_the_same else other
    assert second.get("k", hold=True, name="second") == (IN_POOL, 2)
    consumer.drop("k")
    assert producer.reap() == 0
    assert second.look("second") == 2
    second.drop("second")
    assert producer.reap() == 1


def test_foreign_files_are_left_alone(start: Start, directory: Path, root: str) -> None:
    producer, consumer = start(), start()
    producer.put("k", IN_RING, 1)
    (outbox,) = directory.glob("*.out")
    (directory / "link.out").symlink_to(outbox)
    (directory / "dangling.out").symlink_to("/nowhere")
    (directory / "directory.out").mkdir()
    os.mkfifo(directory / "fifo.out", 0o600)
    (directory / "text.out").write_text("not ours" * 4096)
    loose = directory / "loose.out"
    loose.write_bytes(outbox.read_bytes())
    loose.chmod(0o666)
    assert consumer.get("k") == (IN_RING, 1)
    assert consumer.get("k") is None
    assert consumer.health()[1] == "6 foreign"
    for foreign in ("link", "dangling", "fifo", "text", "loose"):
        (directory / f"{foreign}.out").unlink()
    (directory / "directory.out").rmdir()


@as_root
@pytest.mark.parametrize("whose", ["home", "arena"])
@pytest.mark.parametrize("what", ["of another user", "open to others", "a link", "a file"])
def test_a_directory_that_is_not_ours_alone_is_refused(root: str, what: str, whose: str) -> None:
    home = Path(root) / f"vllm-omni-sched-{os.geteuid()}"
    found = home if whose == "home" else home / "a"
    found.parent.mkdir(mode=0o700, exist_ok=True)
    if what == "a link":
        found.symlink_to("/tmp")
    elif what == "a file":
        found.touch(0o600)
    else:
        found.mkdir(mode=0o700)
    if what == "of another user":
        os.chown(found, 12345, 12345)
    elif what == "open to others":
        found.chmod(0o750)
    with pytest.raises(RendezvousError, match=rf"{found} is not a directory of this user alone .* `directory`"):
        ArenaPath(small(root))
    if what in ("a link", "a file"):
        found.unlink()
    else:
        os.chown(found, 0, 0)
        found.rmdir()


def test_a_directory_that_cannot_be_made_is_named(root: str) -> None:
    with pytest.raises(RendezvousError, match=r"cannot make or open /nowhere/vllm-omni-sched-\d+ \(No such file"):
        ArenaPath(small("/nowhere"))


@as_root
def test_another_user_sees_nothing(all_processes: Processes, start: Start, options: ArenaOptions, root: str) -> None:
    os.chmod(root, 0o1777)
    producer = start()
    producer.put("k", IN_POOL, 1)
    stranger = all_processes.start()
    stranger.become(12345)
    home = Path(root) / "vllm-omni-sched-0"
    for path in (home, *home.glob("a/*")):
        assert stranger.try_to_open(str(path)) == "PermissionError"
        assert path.lstat().st_mode & 0o077 == 0
    stranger.open(options.model_dump())
    assert stranger.get("k") is None
    stranger.put("k", IN_POOL, 2)
    assert producer.get("k") == (IN_POOL, 1)
    stranger.close()
    assert os.listdir(root) == ["vllm-omni-sched-0"]


def test_an_arena_that_was_removed_under_living_processes(start: Start, directory: Path) -> None:
    """By hand, or by a login manager: clean errors, and what is held stays."""
    producer, consumer = start(), start()
    producer.put("k", IN_POOL, 1)
    producer.put("l", IN_POOL, 1)
    consumer.get("k", hold=True)
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()
    assert producer.reap() == 0  # whether the consumer lives, nobody can say
    assert producer.health()[2]["given_back"] == 0
    assert consumer.look("k") == 1
    assert consumer.get("l") == (IN_POOL, 1)
    with pytest.raises(RendezvousError, match=r"cannot look for messages in .* No such file"):
        consumer.get("m")
    with pytest.raises(RendezvousError, match="No such file"):
        producer.get("m")
    producer.close()
    consumer.close()


# -- clocks, forks, and two paths in one process


def test_clocks_that_jump(root: str) -> None:
    """One clock, handed in, is all the arena reads: `clock.monotonic_seconds`, the same for all processes of a host."""
    clock = FakeClock()
    sender = ArenaPath(small(root, ttl_seconds=60), clock=clock)
    receiver = ArenaPath(small(root, ttl_seconds=60), clock=clock)
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
    late = ArenaPath(small(root, ttl_seconds=60), clock=clock)
    late.put(make_message(EDGE, "c", 1))
    assert receiver.get(EDGE, "c") is not None
    for path in (sender, receiver, late):
        path.close()


def test_a_clock_that_jumps_while_a_new_sender_comes(root: str) -> None:
    """Time stamps of a directory are no proof for ever: receivers look again when they bury."""
    clock = FakeClock()
    receiver = ArenaPath(small(root), clock=clock)
    assert receiver.get(EDGE, "k") is None
    stamp = os.stat(receiver.directory)
    sender = ArenaPath(small(root), clock=clock)
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
    """Neither the path, nor the right to end its parent's leases."""
    parent, producer = start(), start()
    producer.put("k", IN_POOL, 1)
    parent.get("k", hold=True)
    parent.put("a", IN_POOL, 2)
    said = parent.fork_and_use()
    assert said == [
        f"{PathClosedError.__name__}: the arena was closed by a fork, for the child, before this put",
        f"{PathClosedError.__name__}: the arena was closed by a fork, for the child, before this get",
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
    one, two = ArenaPath(small(root)), ArenaPath(small(root))
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


# -- nothing is left


def test_nothing_is_left_when_all_have_closed(start: Start, root: str) -> None:
    processes = [start() for _ in range(4)]
    for process in processes:
        process.put_many(5, IN_POOL)
        process.get("m3", hold=True)
    for process in processes:
        process.close()
    assert os.listdir(root) == []


def test_nothing_is_left_by_a_process_that_ends_and_has_not_closed(root: str) -> None:
    program = f"""if True:
        import numpy
        from tests.support.arena import EDGE, ArenaPath, make_message, small
        path = ArenaPath(small({root!r}))
        path.put(make_message(EDGE, "k", numpy.ones((1, 10000))))
        held = path.get(EDGE, "k").open()
        print(held.sum())
    """
    here = Path(__file__).parents[4]
    ended = subprocess.run([sys.executable, "-c", program], cwd=here, capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("10000.0\n", "")
    assert os.listdir(root) == []


def test_nothing_is_left_when_all_were_killed_and_somebody_has_swept(start: Start, root: str) -> None:
    processes = [start() for _ in range(4)]
    for process in processes:
        process.put_many(5, IN_POOL)
        process.get("m3", hold=True)
    home = Path(root) / f"vllm-omni-sched-{os.geteuid()}"
    assert meeting.sweep(home) == 0
    for process in processes:
        assert home.exists()
        process.kill()
    assert meeting.sweep(home) == 1
    assert os.listdir(root) == []


def test_sweep_leaves_what_it_did_not_make(root: str) -> None:
    home = Path(root) / f"vllm-omni-sched-{os.geteuid()}"
    (home / "a" / "directory").mkdir(parents=True)
    (home / "file").touch()
    (home / "link").symlink_to("/tmp")
    assert meeting.sweep(home) == 0
    assert (home / "a" / "directory").exists()
    assert meeting.sweep(Path(root) / "nowhere") == 0
    (home / "a" / "directory").rmdir()
    (home / "link").unlink()
    (home / "file").unlink()
    assert meeting.sweep(home) == 1


def _write_to_record(directory: Path, state: int, at: int, written: bytes) -> None:
    """Into the only record of the only outbox that is in a state."""
    (outbox,) = directory.glob("*.out")
    _, _, slots, _, ring_bytes, _ = layout.HEAD.unpack(outbox.read_bytes()[: layout.HEAD.size])
    sizes = Layout.of(slots, ring_bytes)
    with open(outbox, "r+b") as file:
        content = file.read()
        (slot,) = (i for i in range(slots) if layout.STATE.unpack_from(content, sizes.record_at(i))[0] == state)
        file.seek(sizes.record_at(slot) + at)
        file.write(written)
