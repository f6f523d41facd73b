"""Altered bytes of a message: never delivered, an error that says so, and counted, by every path that checks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.altered import Medium
from tests.support.arena import place, small
from tests.support.tiers import files as disk_options
from tests.support.transport_kinds import CHECKING, POOL, Kind, Open
from vllm_omni_sched.clock import monotonic_seconds, sleep_seconds
from vllm_omni_sched.config.errors import CorruptMessageError
from vllm_omni_sched.connectors.arena import ArenaOptions, ArenaTransport
from vllm_omni_sched.connectors.disk import DiskTransport
from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.framing import Arrival, make_message
from vllm_omni_sched.connectors.framing.message import EMBEDDED
from vllm_omni_sched.connectors.transport import Status, Transport

AB = Edge("a", "b")
SMALL, LARGE = EMBEDDED + 1000, 40_000  # bytes
VALUES = np.arange(LARGE, dtype=np.uint8)


@pytest.fixture(params=CHECKING, ids=lambda kind: kind.__name__)
def checking_end(request: pytest.FixtureRequest) -> Iterator[Open]:
    kind: Kind = request.param
    with kind() as open_end:
        yield open_end


def got(path: Transport, key: str) -> Arrival:
    until = monotonic_seconds() + 5
    while (arrival := path.get(AB, key)) is None:
        assert monotonic_seconds() < until, f"{key!r} is not there"
        sleep_seconds(1e-4)
    return arrival


@pytest.mark.parametrize(("number", "byte"), [(0, 0), (0, SMALL - 1), (1, 0), (1, SMALL // 2)])
@pytest.mark.parametrize("nbytes", [SMALL, LARGE])
def test_one_altered_byte_of_any_buffer_is_an_error_once(
    checking_end: Open, nbytes: int, number: int, byte: int
) -> None:
    sender, receiver = checking_end(), checking_end()
    payload = {"x": VALUES[:nbytes], "y": torch.from_numpy(VALUES[:nbytes].copy()) if number else VALUES[:nbytes] + 1}
    before = receiver.health().facts.get("corrupt", 0)
    if _keeps_tensors_away(sender):  # what lies on a device is not altered by the host's memory
        payload["y"] = VALUES[:nbytes] + 1
    with Medium() as medium:
        medium.alters = number, byte
        sender.put(make_message(AB, "k", payload))
        with pytest.raises(CorruptMessageError, match="does not fit its buffers: some of"):
            got(receiver, "k")
    assert receiver.get(AB, "k") is None
    health = receiver.health()
    assert health.facts["corrupt"] == before + 1
    assert health.status is Status.DEGRADED
    assert "1 corrupt" in health.reason
    sender.reap()
    assert sender.health().facts["in_flight"] == 0  # it is lost, and leaves nothing
    sender.put(make_message(AB, "k", payload))
    found = got(receiver, "k").open()
    assert all(np.array_equal(np.asarray(found[name]), np.asarray(payload[name])) for name in payload)


def _keeps_tensors_away(path: Transport) -> bool:
    return path.name == "cuda_ipc"


def test_a_message_without_buffers_has_nothing_to_alter(checking_end: Open) -> None:
    sender, receiver = checking_end(), checking_end()
    sender.put(make_message(AB, "k", {"n": 1, "small": np.arange(5)}))
    assert got(receiver, "k").open()["n"] == 1


@pytest.mark.parametrize("value", [VALUES[:EMBEDDED], torch.from_numpy(VALUES[:EMBEDDED].copy())])
def test_small_values_are_checked_without_the_option(value: Any) -> None:
    """Flip a random bit of a message in shared memory: none that has only such values is ever delivered altered."""
    rng = random.Random(2)
    with place() as root:
        sender, receiver = (ArenaTransport(ArenaOptions(directory=root, arena="a")) for _ in range(2))
        for turn in range(100):
            sender.put(make_message(AB, "k", {"x": value, "y": value, "n": turn}))
            assert sender._outbox is not None
            (sent,) = sender._outbox.sent.values()
            memory, _ = sender._outbox.storage.at(sent.pool, sent.offset, sent.nbytes)
            assert sent.nbytes > 2 * EMBEDDED
            memory[rng.randrange(sent.nbytes)] ^= 1 << rng.randrange(8)
            with pytest.raises(CorruptMessageError):
                got(receiver, "k")
            sender.reap()
        sender.close()
        receiver.close()


def test_off_means_that_nobody_looks_at_larger_values() -> None:
    """As it is within a host unless somebody asks for it."""
    with place() as root:
        sender, receiver = (ArenaTransport(small(root, image=POOL)) for _ in range(2))
        with Medium() as medium:
            medium.alters = 0, 7
            sender.put(make_message(AB, "k", {"x": VALUES.reshape(1, -1)}))
        assert got(receiver, "k").open()["x"][0, 7] == VALUES[7] ^ 0x10
        sender.close()
        receiver.close()


def _in_memory(root: str) -> tuple[Callable[[], Transport], Callable[[], FilePath]]:
    pool = {**POOL, "initial_bytes": 65536}
    return (
        lambda: ArenaTransport(small(root, image=pool, modality="image", checksum=True)),
        lambda: next(FilePath(root).glob("*/a/*.pool")),
    )


def _in_files(root: str) -> tuple[Callable[[], Transport], Callable[[], FilePath]]:
    return lambda: DiskTransport(disk_options(root)), lambda: next(FilePath(root).glob("*/files/*.msg"))


@pytest.mark.parametrize("where", [_in_memory, _in_files])
def test_what_somebody_writes_over_a_message_where_it_lies_is_never_delivered(where: Callable[..., Any]) -> None:
    """Flip a hundred random bits in the memory or the file: each gives an error, or the payload as it was put."""
    rng, altered = random.Random(1), 0
    with place() as root:
        make, medium = where(root)
        sender, receiver = make(), make()
        for turn in range(100):
            message = make_message(AB, "k", {"x": VALUES, "n": turn})
            sender.put(message)
            with open(medium(), "r+b") as file:
                file.seek(rng.randrange(message.nbytes))
                (byte,) = file.read(1)
                file.seek(-1, 1)
                file.write(bytes([byte ^ 1 << rng.randrange(8)]))
            try:
                found = got(receiver, "k").open()
            except CorruptMessageError:
                altered += 1
            else:
                assert np.array_equal(found["x"], VALUES)
                assert found["n"] == turn
                del found
            sender.reap()
        assert altered > 90
        assert receiver.health().facts["corrupt"] == altered
        sender.close()
        receiver.close()
