"""Messages in files that their own sender leases, while others look at them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.arena import EDGE, pixels
from tests.support.tiers import files, messages
from vllm_omni_sched.config.errors import CorruptMessageError, RendezvousError
from vllm_omni_sched.connectors import disk
from vllm_omni_sched.connectors.disk import DiskTransport
from vllm_omni_sched.connectors.disk.files import Stamp
from vllm_omni_sched.connectors.framing import make_message
from vllm_omni_sched.connectors.transport import Lease


@pytest.fixture
def path(root: str) -> Iterator[DiskTransport]:
    """Make a transport that has one message."""
    path = DiskTransport(files(root))
    path.put(make_message(EDGE, "k", pixels(3, 3000)))
    yield path
    path.close()


def waits(path: DiskTransport) -> bool:
    """Whether the message can be got, and is in the records."""
    facts = path.health().facts
    assert (facts["in_flight"], facts["in_flight_bytes"] > 3000) == (1, True)
    return path.holds(EDGE, "k") and path.discard("k") == 1


def test_a_message_that_is_given_back_while_others_are_looked_at_is_not_taken_for_got(
    path: DiskTransport, monkeypatch: pytest.MonkeyPatch
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
    path: DiskTransport, monkeypatch: pytest.MonkeyPatch
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


@pytest.mark.parametrize("another", [False, True])
def test_a_message_that_is_being_leased_is_not_taken_for_got_and_not_leased_twice(
    path: DiskTransport, monkeypatch: pytest.MonkeyPatch, another: bool
) -> None:
    read = disk.files.read

    def meanwhile(file: Path) -> np.ndarray:
        assert not another or path.lease(EDGE, "k") is None
        assert path.reap() == 0
        return read(file)

    monkeypatch.setattr(disk.files, "read", meanwhile)
    lease = path.lease(EDGE, "k")
    assert lease is not None
    assert lease.give_back()
    assert waits(path)


def test_a_message_put_while_the_one_before_it_is_leased_is_its_own(path: DiskTransport) -> None:
    """The new message can be both peeked at and leased."""
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
    path: DiskTransport, monkeypatch: pytest.MonkeyPatch, error: Exception, told: type[Exception]
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
    path: DiskTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as broken:
        broken.setattr(os, "rename", fails)
        with pytest.raises(RendezvousError, match="cannot search for messages"):
            path.lease(EDGE, "k")
    assert waits(path)


def test_a_damaged_file_that_its_sender_leases_is_gone(path: DiskTransport, directory: Path) -> None:
    (file,) = directory.glob("*.msg")
    stamp = file.stat()
    data = file.read_bytes()
    file.write_bytes(data[:60] + b"\xff" + data[61:])
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    with pytest.raises(CorruptMessageError):
        path.lease(EDGE, "k")
    assert messages(directory) == []
    facts = path.health().facts
    assert (facts["corrupt"], facts["in_flight"]) == (1, 0)
