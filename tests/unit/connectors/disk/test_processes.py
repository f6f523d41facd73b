"""Messages in files while processes are killed at exact points, or fork."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.arena import EDGE, Ahead, pixels
from tests.support.processes import Process
from tests.support.tiers import files, messages
from vllm_omni_sched.connectors.disk import DiskTransport
from vllm_omni_sched.connectors.disk.transport import SWEEP_EVERY
from vllm_omni_sched.connectors.framing import make_message
from vllm_omni_sched.connectors.transport import Status

TTL = 600.0


@pytest.mark.parametrize(
    ("where", "there"),
    [
        ("vllm_omni_sched.connectors.disk.files:write", False),
        ("vllm_omni_sched.connectors.framing:Message.pieces", False),
        ("os:utime", False),
        ("os:rename", False),
        ("vllm_omni_sched.connectors.disk.transport:Outbox._enter", True),
    ],
)
def test_a_sender_of_files_killed_in_put(
    start: Callable[[], Process], root: str, directory: Path, where: str, there: bool
) -> None:
    clock = Ahead()
    receiver = DiskTransport(files(root), clock=clock)
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
    sender, receiver = DiskTransport(files(root), clock=clock), start()
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
    receiver, sender = DiskTransport(files(root), clock=clock), start()
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


def test_a_forked_child_is_told_that_files_are_not_its_own(start: Callable[[], Process]) -> None:
    process = start()
    process.put("a", 3000, 1)
    said = process.fork_and_use()
    assert [line.split(":")[0] for line in said] == ["TransportClosedError", "TransportClosedError", "0", "closed"]
    assert process.get("a") == (3000, 1)
    process.close()
