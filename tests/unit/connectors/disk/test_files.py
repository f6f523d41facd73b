"""Files that expire, are damaged, foreign or not private, and disks without room."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import numpy as np
import pytest

from tests.support.arena import EDGE, KIB, LONG, FakeClock, pixels
from tests.support.processes import Processes
from tests.support.tiers import files, messages
from vllm_omni_sched.clock import monotonic_seconds
from vllm_omni_sched.config.errors import CorruptMessageError, MessageTooLargeError, NoRoomError, RendezvousError
from vllm_omni_sched.connectors.disk import DiskTransport
from vllm_omni_sched.connectors.framing import make_message
from vllm_omni_sched.connectors.transport import Status


def test_messages_in_files_that_nobody_gets_expire_and_are_counted(root: str, directory: Path) -> None:
    clock = FakeClock()
    path = DiskTransport(files(root, ttl_seconds=60), clock=clock)
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
    "front": lambda data: data[:60] + bytes([data[60] ^ 1]) + data[61:],
    "another": lambda data: bytes(make_message(EDGE, "another", pixels(1, 3000)).to_buffer()),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_a_corrupt_message_and_gone(root: str, directory: Path, damage: str) -> None:
    path = DiskTransport(files(root))
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
    path = DiskTransport(files(root))
    path.put(make_message(EDGE, "k", pixels(1, 3000)))
    assert directory.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in directory.iterdir()} == {0o600}
    (file,) = directory.glob("*.msg")
    file.chmod(0o644)
    with pytest.raises(CorruptMessageError, match="not a private file of this user"):
        path.get(EDGE, "k")
    path.close()
    os.mkdir(f"{root}/open", 0o777)
    os.mkdir(f"{root}/open/vllm-omni-sched-{os.geteuid()}", 0o755)
    with pytest.raises(RendezvousError, match="not a private directory of this user"):
        DiskTransport(files(f"{root}/open"))
    os.rmdir(f"{root}/open/vllm-omni-sched-{os.geteuid()}")
    os.rmdir(f"{root}/open")


def test_a_file_that_may_not_get_so_long_is_no_room(root: str, directory: Path) -> None:
    """As a quota would say; what was begun goes, and what is there can be got."""
    path = DiskTransport(files(root))
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
    process.open_files(root)
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
    path = DiskTransport(files(root, max_bytes=64 * KIB))
    with pytest.raises(MessageTooLargeError, match=r"raise its max_bytes \(65536\)"):
        path.put(make_message(EDGE, "k", pixels(1, 70 * KIB)), monotonic_seconds() + LONG)
    path.close()


def test_two_senders_of_one_key_and_foreign_files(root: str, directory: Path) -> None:
    first, second = DiskTransport(files(root)), DiskTransport(files(root))
    (directory / "foreign.txt").write_text("left alone")
    first.put(make_message(EDGE, "k", np.arange(3)))
    second.put(make_message(EDGE, "k", np.arange(4)))
    assert first.discard("k") == 0  # it is the second's now
    arrival = first.get(EDGE, "k")
    assert arrival is not None
    assert len(arrival.open()) == 4
    first.members.sweep()
    assert (directory / "foreign.txt").exists()
    for path in (first, second):
        assert path.health().facts["in_flight"] == 0
        path.close()
