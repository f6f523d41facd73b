"""Messages that nobody got in time, or that were put again: they are taken back unread, whatever has become of them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.arena import EDGE, KIB, FakeClock, pixels
from tests.support.tiers import expect, small_tiers
from vllm_omni_sched.config.errors import RendezvousError
from vllm_omni_sched.connectors.disk import DiskTransport, files
from vllm_omni_sched.connectors.framing import make_message
from vllm_omni_sched.connectors.tiers import TieredTransport

TTL = 600.0


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def sender(root: str, clock: FakeClock) -> Iterator[TieredTransport]:
    path = small_tiers(root, clock, ttl_seconds=TTL)
    yield path
    path.close()


def put(path: TieredTransport, key: str, wait: float = 1.0) -> str:
    """Returns the tier."""
    message = make_message(EDGE, key, {"x": pixels(1, 6 * KIB)})
    expect(path, wait)
    path.put(message)
    item = path.ledger.get(message.name)
    assert item is not None
    return path._transports[item.tier].name


def put_below(path: TieredTransport, key: str) -> None:
    for i in range(80):  # the arena is filling up
        put(path, f"fill {i}")
    assert put(path, key, wait=1e6) == "disk"
    for i in range(80):
        path.discard(f"fill {i}")


def test_a_message_that_expires_is_not_read(
    sender: TieredTransport, root: str, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does what is wrong with it concern who puts another one."""
    put_below(sender, "late")
    (file,) = Path(root).rglob("*.msg")
    known = file.stat()
    os.truncate(file, 100)
    os.utime(file, ns=(known.st_mtime_ns, known.st_mtime_ns))
    monkeypatch.setattr(files, "read", lambda path: pytest.fail("it was read"))
    clock.now += TTL + 1
    put(sender, "other")
    assert list(Path(root).rglob("*.msg")) == []
    facts = sender.health().facts
    assert (facts["expired"], facts["in_flight"]) == (1, 1)


def test_a_message_that_is_put_again_is_not_read(
    sender: TieredTransport, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_below(sender, "again")
    monkeypatch.setattr(files, "read", lambda path: pytest.fail("it was read"))
    assert put(sender, "again") == "arena"
    assert list(Path(root).rglob("*.msg")) == []
    facts = sender.health().facts
    assert (facts["replaced"], facts["in_flight"]) == (1, 1)


def test_what_cannot_be_taken_back_stops_nobody_and_is_tried_again(
    sender: TieredTransport, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put_below(sender, "late")
    clock.now += TTL + 1

    def fails(*args: object) -> bool:
        raise RendezvousError("the disk is away")

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(DiskTransport, "withdraw", fails)
        for i in range(3):
            put(sender, f"other {i}")
        sender.reap()
        assert sender.health().facts["in_flight"] == 4
    assert caplog.text.count("the disk is away") == 1
    sender.reap()
    facts = sender.health().facts
    assert (facts["expired"], facts["in_flight"]) == (1, 3)
