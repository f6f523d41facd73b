"""Messages between an owner and its decoders, among them some that a decoder should not send."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import msgspec
import pytest

from tests.support.descriptors import nothing_left_open
from vllm_omni_sched.video.facts import PieceResult
from vllm_omni_sched.video.pool import messages
from vllm_omni_sched.video.pool.channel import (
    Channel,
    close_all,
    closing_fd,
    memory_file,
    read_all,
    socket_pair,
)


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = socket_pair()
    with ours, theirs:
        yield Channel(ours, messages.from_worker), Channel(theirs, messages.from_owner)


@pytest.mark.parametrize("slots", [3, 200_000])
def test_messages_of_any_size(ends: tuple[Channel, Channel], slots: int) -> None:
    owner, worker = ends
    done = messages.Done(5, PieceResult(tuple(range(slots)), False, slots, 0.5, 0.25, 7))
    with nothing_left_open():
        worker.send(done)
        assert owner.receive() == (done, [])
        assert owner.receive() is None


def test_descriptors_travel(ends: tuple[Channel, Channel]) -> None:
    owner, worker = ends
    with closing_fd(memory_file("test", b"first ", b"second")) as fd:
        owner.send(messages.Open(2, 3), (fd, fd))
    received = worker.receive()
    assert received is not None
    message, fds = received
    assert message == messages.Open(2, 3)
    assert [read_all(fd, 100) for fd in fds] == [b"first second"] * 2
    assert not any(os.get_inheritable(fd) for fd in fds)
    with pytest.raises(ValueError, match="12 bytes, but only 11 are allowed"):
        read_all(fds[0], 11)
    close_all(fds)


@pytest.mark.parametrize(
    "data",
    [
        b"\0\xff\xff",
        b"\0" + msgspec.msgpack.encode(messages.Close()),  # an owner's message, to an owner
        b"\0" + msgspec.msgpack.encode({"type": "Done", "task": "5"}),
        b"\0",
    ],
)
def test_what_is_no_message(data: bytes) -> None:
    ours, theirs = socket_pair()
    owner = Channel(ours, messages.from_worker)
    with closing_fd(os.memfd_create("test")) as fd, nothing_left_open():
        socket.send_fds(theirs, [data], [fd])
        with pytest.raises(msgspec.DecodeError):
            owner.receive()
    owner.close()
    theirs.close()


def test_a_large_message_without_its_memory(ends: tuple[Channel, Channel]) -> None:
    owner, worker = ends
    worker.end.send(b"\1")
    with pytest.raises(ValueError, match="without its memory file"):
        owner.receive()


def test_more_descriptors_than_may_come_are_closed() -> None:
    ours, theirs = socket_pair()
    owner = Channel(ours, messages.from_worker)
    with closing_fd(os.memfd_create("test")) as fd, nothing_left_open():
        socket.send_fds(theirs, [b"\0" + msgspec.msgpack.encode(messages.Ready())], [fd] * 50)
        received = owner.receive()
        assert received is not None
        close_all(received[1])
    owner.close()
    theirs.close()


@pytest.mark.parametrize("data", [b"", b"\xc0", messages.encode_index.__name__.encode()])
def test_what_is_no_index(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        messages.decode_index(data)
