"""Messages in files when things break: with real processes, killed at exact points."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.arena import EDGE, KIB, LONG, FakeClock, pixels
from tests.support.processes import Process, Processes
from tests.support.tiers import files
from vllm_omni_sched.clock import monotonic_seconds
from vllm_omni_sched.connectors import disk
from vllm_omni_sched.connectors.base import Lease, Status
from vllm_omni_sched.connectors.disk import DiskPath
from vllm_omni_sched.connectors.disk.files import Stamp
from vllm_omni_sched.connectors.disk.path import SWEEP_EVERY
from vllm_omni_sched.connectors.framing import make_message
from vllm_omni_sched.errors import CorruptMessageError, MessageTooLargeError, NoRoomError, RendezvousError

TTL = 600.0


@pytest.fixture
def start(all_processes: Processes, root: str) -> Callable[[], Process]:
    def started() -> Process:
        process = all_processes.start()
        process.open_tiers(root, disk_only=True)
        return process

    return started


@pytest.fixture
def directory(root: str) -> Path:
    return Path(root) / f"vllm-omni-sched-{os.geteuid()}" / "files"


class Ahead:
    """The clock of all processes, and some seconds more."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return monotonic_seconds() + self.seconds


def messages(directory: Path) -> list[str]:
    return sorted(path.suffix for path in directory.iterdir() if path.suffix != ".life")


@pytest.mark.parametrize(
    ("where", "there"),
    [
        ("vllm_omni_sched.connectors.disk.files:write", False),
        ("vllm_omni_sched.connectors.framing:Message.pieces", False),
        ("os:utime", False),
        ("os:rename", False),
        ("vllm_omni_sched.connectors.disk.outbox:Outbox._enter", True),
    ],
)
def test_a_sender_of_files_killed_in_put(
    start: Callable[[], Process], root: str, directory: Path, where: str, there: bool
) -> None:
    clock = Ahead()
    receiver = DiskPath(files(root), clock=clock)
    sender = start()
    sender.die_at(where)
    sender.dies("put", "k", 5000, 7)
    clock.seconds = SWEEP_EVERY + 1
    arrival = receiver.get(EDGE, "k")
    assert (arrival is not None) == there
    assert arrival is None or arrival.open()["x"].min() == 7
    clock.seconds *= 3
    receiver.health()
    assert messages(directory) == []
    receiver.close()


@pytest.mark.parametrize("where", ["vllm_omni_sched.connectors.disk.files:read", "pathlib:Path.unlink"])
def test_a_receiver_of_files_killed_in_get_gives_its_message_back(
    start: Callable[[], Process], root: str, directory: Path, where: str
) -> None:
    clock = Ahead()
    sender, receiver = DiskPath(files(root), clock=clock), start()
    sender.put(make_message(EDGE, "k", {"x": pixels(3, 5000)}))
    receiver.die_at(where)
    receiver.dies("get", "k")
    assert messages(directory) == [".got"]
    clock.seconds = SWEEP_EVERY + 1
    assert start().get("k") is None  # nobody has swept yet: those of the dead may be looked at now and then only
    assert sender.health().facts["given_back"] == 1
    assert start().get("k") == (5000, 3)
    assert messages(directory) == []
    sender.close()


def test_what_a_sender_of_files_has_put_outlives_it_and_expires(start: Callable[[], Process], root: str) -> None:
    clock = Ahead()
    receiver, sender = DiskPath(files(root), clock=clock), start()
    sender.put_many(10, 3000)
    sender.kill()
    arrival = receiver.get(EDGE, "m3")
    assert arrival is not None
    assert arrival.open()["x"].min() == 3
    clock.seconds = TTL / 2
    assert receiver.health().facts["orphans_expired"] == 0
    clock.seconds = TTL + 10
    facts = receiver.health().facts
    assert facts["orphans_expired"] == 9
    assert receiver.health().status is Status.DEGRADED
    assert receiver.get(EDGE, "m4") is None
    receiver.close()


def test_messages_in_files_that_nobody_gets_expire_and_are_counted(root: str, directory: Path) -> None:
    clock = FakeClock()
    path = DiskPath(files(root, ttl_seconds=60), clock=clock)
    for i in range(20):
        path.put(make_message(EDGE, f"{i}", pixels(1, 3000)))
    clock.now += 61
    facts = path.health().facts
    assert (facts["expired"], facts["in_flight"], facts["in_flight_bytes"]) == (20, 0, 0)
    assert messages(directory) == []
    path.close()


DAMAGE = {
    "cut": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "front": lambda data: data[:60] + b"\xff" + data[61:],
    "another": lambda data: bytes(make_message(EDGE, "another", pixels(1, 3000)).to_buffer()),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_a_corrupt_message_and_gone(root: str, directory: Path, damage: str) -> None:
    path = DiskPath(files(root))
    path.put(make_message(EDGE, "k", pixels(1, 3000)))
    (file,) = directory.glob("*.msg")
    file.write_bytes(DAMAGE[damage](file.read_bytes()))
    with pytest.raises(CorruptMessageError):
        path.get(EDGE, "k")
    assert path.get(EDGE, "k") is None
    assert messages(directory) == []
    facts = path.health().facts
    assert (facts["corrupt"], facts["in_flight"]) == (1, 0)
    path.close()


def test_files_are_private(root: str, directory: Path) -> None:
    path = DiskPath(files(root))
    path.put(make_message(EDGE, "k", pixels(1, 3000)))
    assert directory.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in directory.iterdir()} == {0o600}
    (file,) = directory.glob("*.msg")
    file.chmod(0o644)
    with pytest.raises(CorruptMessageError, match="not a file of this user alone"):
        path.get(EDGE, "k")
    path.close()
    os.mkdir(f"{root}/open", 0o777)
    os.mkdir(f"{root}/open/vllm-omni-sched-{os.geteuid()}", 0o755)
    with pytest.raises(RendezvousError, match="not a directory of this user alone"):
        DiskPath(files(f"{root}/open"))
    os.rmdir(f"{root}/open/vllm-omni-sched-{os.geteuid()}")
    os.rmdir(f"{root}/open")


def test_a_file_that_may_not_get_so_long_is_no_room(root: str, directory: Path) -> None:
    """As a quota would say; what was begun goes, and what is there can be got."""
    path = DiskPath(files(root))
    path.put(make_message(EDGE, "k", pixels(1, 3000)))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * KIB, before[1]))
    try:
        with pytest.raises(NoRoomError, match=r"no room for \d+ bytes on edge 0->1.* is full \(File too large\)"):
            path.put(make_message(EDGE, "l", pixels(1, 100 * KIB)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.health().status is Status.SICK
    assert messages(directory) == [".msg"]
    path.put(make_message(EDGE, "l", pixels(1, 100 * KIB)))
    assert path.health().facts["in_flight"] == 2
    path.close()


def test_a_file_system_that_is_full_is_no_room(all_processes: Processes, root: str) -> None:
    process = all_processes.start()
    try:
        process.own_mount(root, 512 * KIB)
    except OSError as error:
        pytest.skip(str(error))
    process.open_tiers(root, disk_only=True)
    with pytest.raises(NoRoomError, match=r"is full \(No space left on device\)"):
        process.put_many(100, 20 * KIB)
    status, reason, facts = process.health()
    assert (status, facts["refused"]) == ("sick", 1)
    assert "No space left" in reason
    assert facts["in_flight"] > 10
    for i in range(facts["in_flight"]):
        assert process.get(f"m{i}") == (20 * KIB, i)
    assert process.put("again", 20 * KIB, 1) > 0
    process.close()


def test_what_is_larger_than_the_disk_may_get_is_refused_at_once(root: str) -> None:
    path = DiskPath(files(root, max_bytes=64 * KIB))
    with pytest.raises(MessageTooLargeError, match=r"raise its max_bytes \(65536\)"):
        path.put(make_message(EDGE, "k", pixels(1, 70 * KIB)), monotonic_seconds() + LONG)
    path.close()


def test_two_senders_of_one_key_and_foreign_files(root: str, directory: Path) -> None:
    first, second = DiskPath(files(root)), DiskPath(files(root))
    (directory / "foreign.txt").write_text("left alone")
    first.put(make_message(EDGE, "k", np.arange(3)))
    second.put(make_message(EDGE, "k", np.arange(4)))
    assert not first.holds(EDGE, "k")
    assert first.lease(EDGE, "k") is None
    assert first.discard("k") == 0  # it is the second's now
    arrival = first.get(EDGE, "k")
    assert arrival is not None
    assert len(arrival.open()) == 4
    first.members.sweep()
    assert (directory / "foreign.txt").exists()
    for path in (first, second):
        assert path.health().facts["in_flight"] == 0
        path.close()


@pytest.fixture
def path(root: str) -> Iterator[DiskPath]:
    """With one message."""
    path = DiskPath(files(root))
    path.put(make_message(EDGE, "k", pixels(3, 3000)))
    yield path
    path.close()


def waits(path: DiskPath) -> bool:
    """Whether the message can be got, and is in the books."""
    facts = path.health().facts
    assert (facts["in_flight"], facts["in_flight_bytes"] > 3000) == (1, True)
    return path.holds(EDGE, "k") and path.discard("k") == 1


def test_a_message_that_is_being_leased_is_not_taken_for_got(path: DiskPath, monkeypatch: pytest.MonkeyPatch) -> None:
    read = disk.files.read

    def reaped_meanwhile(file: Path) -> np.ndarray:
        assert path.reap() == 0
        return read(file)

    monkeypatch.setattr(disk.files, "read", reaped_meanwhile)
    lease = path.lease(EDGE, "k")
    assert lease is not None
    assert lease.give_back()
    assert waits(path)


def test_a_message_that_is_given_back_while_others_are_looked_at_is_not_taken_for_got(
    path: DiskPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    stamp_of = disk.files.stamp_of
    leases: list[Lease | None] = []

    def leased_meanwhile(file: Path) -> Stamp | None:
        if leases:
            return stamp_of(file)
        leases.append(None)
        lease = path.lease(EDGE, "k")
        assert lease is not None
        seen = stamp_of(file)
        assert seen is None
        assert lease.give_back()
        return seen

    monkeypatch.setattr(disk.files, "stamp_of", leased_meanwhile)
    assert path.reap() == 0
    assert waits(path)


def test_a_message_leased_after_it_was_looked_at_is_not_taken_for_got(
    path: DiskPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    stamp_of = disk.files.stamp_of
    leases: list[Lease] = []

    def leased_meanwhile(file: Path) -> Stamp | None:
        monkeypatch.setattr(disk.files, "stamp_of", stamp_of)
        lease = path.lease(EDGE, "k")
        assert lease is not None
        leases.append(lease)
        return stamp_of(file)

    monkeypatch.setattr(disk.files, "stamp_of", leased_meanwhile)
    assert path.reap() == 0
    assert leases[0].give_back()
    assert waits(path)


def test_of_two_that_lease_a_message_one_does(path: DiskPath, monkeypatch: pytest.MonkeyPatch) -> None:
    read = disk.files.read

    def leased_meanwhile(file: Path) -> np.ndarray:
        assert path.lease(EDGE, "k") is None
        assert path.reap() == 0
        return read(file)

    monkeypatch.setattr(disk.files, "read", leased_meanwhile)
    lease = path.lease(EDGE, "k")
    assert lease is not None
    assert lease.give_back()
    assert waits(path)


def test_a_message_put_while_the_one_before_it_is_leased_is_its_own(path: DiskPath) -> None:
    """In both ways: it is looked at, and it can be leased."""
    lease = path.lease(EDGE, "k")
    assert lease is not None
    path.put(make_message(EDGE, "k", pixels(4, 3000)))
    second = path.lease(EDGE, "k")
    assert second is not None
    assert second.give_back()
    arrival = path.get(EDGE, "k")
    assert arrival is not None
    assert arrival.open().min() == 4
    assert path.reap() == 1
    assert not lease.give_back()
    assert path.health().facts["in_flight"] == 0


@pytest.mark.parametrize(
    ("error", "told"), [(OSError(24, "Too many open files"), RendezvousError), (MemoryError(), MemoryError)]
)
def test_a_message_that_cannot_be_read_for_a_lease_waits_still(
    path: DiskPath, monkeypatch: pytest.MonkeyPatch, error: Exception, told: type[Exception]
) -> None:
    def fails(_: Path) -> np.ndarray:
        path.reap()
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(disk.files, "read", fails)
        with pytest.raises(told):
            path.lease(EDGE, "k")
    assert waits(path)


def test_a_message_that_cannot_be_renamed_for_a_lease_waits_still(
    path: DiskPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as broken:
        broken.setattr(os, "rename", fails)
        with pytest.raises(RendezvousError, match="cannot look for messages"):
            path.lease(EDGE, "k")
    assert waits(path)


def test_a_damaged_file_that_its_sender_leases_is_gone(path: DiskPath, directory: Path) -> None:
    (file,) = directory.glob("*.msg")
    stamp = file.stat()
    file.write_bytes(DAMAGE["front"](file.read_bytes()))
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    with pytest.raises(CorruptMessageError):
        path.lease(EDGE, "k")
    assert messages(directory) == []
    facts = path.health().facts
    assert (facts["corrupt"], facts["in_flight"]) == (1, 0)


def test_a_forked_child_is_told_that_files_are_not_its_own(start: Callable[[], Process]) -> None:
    process = start()
    process.put("a", 3000, 1)
    said = process.fork_and_use()
    assert [line.split(":")[0] for line in said] == ["PathClosedError", "PathClosedError", "0", "closed"]
    assert process.get("a") == (3000, 1)
    process.close()
