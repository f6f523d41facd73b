"""Files that are damaged, foreign, or another user's.

All with real processes, each killed by SIGKILL or stopped at an exact point.
"""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path

import pytest

from tests.support.arena import EDGE, pixels, small
from tests.support.arena_faults import IN_POOL, IN_RING, Start, as_root, write_to_record
from tests.support.processes import Processes
from vllm_omni_sched.config.errors import CorruptMessageError, RendezvousError
from vllm_omni_sched.connectors.arena import ArenaOptions, ArenaTransport, index
from vllm_omni_sched.connectors.framing import make_message

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
        head = file.read(index.HEAD.size)
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
    with pytest.raises(CorruptMessageError, match="the record of a message"):
        consumer.get("1")
    assert consumer.get("1") is None  # dropped
    assert consumer.health()[1] == "1 corrupt"
    producer.kill()


def test_a_pool_that_was_removed_is_a_corrupt_message(start: Start, directory: Path) -> None:
    producer, consumer = start(), start()
    producer.put("k", IN_POOL, 1)
    (pool,) = directory.glob("*.pool")
    pool.unlink()
    with pytest.raises(CorruptMessageError, match="names a pool that does not exist"):
        consumer.get("k")
    assert consumer.get("k") is None


TIMES = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan, "far": 1e300, "-far": -1e300}
SIGNALLING = struct.pack("<Q", 0x7FF0000000000001)
"""A NaN that arithmetic complains about."""


@pytest.mark.parametrize("said", [*(struct.pack("<d", time) for time in TIMES.values()), SIGNALLING], ids=[*TIMES, "s"])
def test_a_damaged_time_does_no_harm(options: ArenaOptions, directory: Path, start: Start, said: bytes) -> None:
    """The sender has its own; what a dead one has left behind goes."""
    sender, receiver = ArenaTransport(options), ArenaTransport(options)
    sender.put(make_message(EDGE, "k", pixels(1, IN_POOL)))
    write_to_record(directory, index.State.READY, index.PUT_AT, said)
    assert sender.reap() == 0
    assert sender.health().facts["in_flight"] == 1
    arrival = receiver.get(EDGE, "k")
    assert arrival is not None
    assert arrival.put_at in (None, 1e300)  # not one from which a duration is made
    assert arrival.open()[0, 0] == 1
    del arrival
    assert sender.reap() == 1
    sender.close()
    dies = start()
    dies.put("k", IN_POOL, 1)
    write_to_record(directory, index.State.READY, index.PUT_AT, said)
    dies.kill()
    inbox = receiver._inbox
    assert inbox is not None
    assert receiver.get(EDGE, "other") is None
    assert inbox.bury() == 2  # that of the sender that closed, too
    assert inbox.counts.orphans_expired == 1
    receiver.close()


RECORD_DAMAGE = {
    "generation": (4, struct.pack("<I", 77), "of generation 1 in place of generation 77"),
    "pool": (8, struct.pack("<I", 3), "names a pool that does not exist"),
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
    write_to_record(directory, index.State.READY, at, written)
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
    write_to_record(directory, index.State.READY, 0, struct.pack("<I", state))
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
    with pytest.raises(RendezvousError, match=rf"{found} is not a private directory of this user .* `directory`"):
        ArenaTransport(small(root))
    if what in ("a link", "a file"):
        found.unlink()
    else:
        os.chown(found, 0, 0)
        found.rmdir()


def test_a_directory_that_cannot_be_made_is_named(root: str) -> None:
    with pytest.raises(RendezvousError, match=r"cannot make or open /nowhere/vllm-omni-sched-\d+ \(No such file"):
        ArenaTransport(small("/nowhere"))


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
    """Removal by hand or by a login manager gives clean errors, and what is held stays."""
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
    with pytest.raises(RendezvousError, match=r"cannot search for messages in .* No such file"):
        consumer.get("m")
    with pytest.raises(RendezvousError, match="No such file"):
        producer.get("m")
    producer.close()
    consumer.close()
