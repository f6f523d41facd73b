"""What the owner of decoders makes of what a process says; the process is a socket's other end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest import mock

import msgspec
import pytest

from tests.support import video_actors as actors
from tests.support.descriptors import nothing_left_open
from vllm_omni_sched.graph.order import REALTIME
from vllm_omni_sched.video.facts import PieceResult
from vllm_omni_sched.video.pool import messages
from vllm_omni_sched.video.pool.channel import (
    Channel,
    close_all,
    closing_fd,
    socket_pair,
)
from vllm_omni_sched.video.pool.decoder_pool import DecoderPool, DecoderSlot
from vllm_omni_sched.video.pool.job import Answer, Job, Task
from vllm_omni_sched.video.pool.kinds import CPU

READY = messages.Ready()
INDEXED = messages.Indexed(7, msgspec.Raw(b"\xc0"), 0.0)
DONE = messages.Done(7, PieceResult((), False, 0, 0.0, 0.0, 0))
FAILED = messages.Failed(7, messages.Failure.INPUT, "")


class Said:
    """A pool of one slot, and the messages that its process sends."""

    def __init__(self) -> None:
        ours, theirs = socket_pair()
        self.process = mock.Mock(channel=Channel(ours, messages.from_worker), **{"end.return_value": "ended"})
        self._end = Channel(theirs, messages.from_owner)
        self.pool = DecoderPool((actors.kind(1),), mock.Mock(), mock.Mock(), mock.Mock(), mock.Mock())
        self.slot: DecoderSlot = self.pool.slots[0]
        self.slot.process, self.slot.ready = self.process, True

    def __call__(self, message: object, files: int, *, piece: bool) -> object:
        """What comes of it, while the process has a task."""
        self.slot.job = Job(0.0, REALTIME)
        self.slot.task = Task(mock.Mock(), CPU, 0.0, needs_open=piece, number=7)
        with closing_fd(os.memfd_create("x")) as fd:
            self._end.send(message, [fd] * files)
        return self.pool.read(self.slot)

    def close(self) -> None:
        self.process.channel.close()
        self._end.close()


@pytest.fixture
def said() -> Iterator[Said]:
    said = Said()
    yield said
    said.close()


@pytest.mark.parametrize(
    ("message", "files", "piece"),
    [
        (READY, 0, True),  # again
        (READY, 4, True),
        (DONE, 1, True),
        (DONE, 0, False),
        (FAILED, 1, False),
        (INDEXED, 2, False),
        (INDEXED, 1, True),
    ],
)
def test_who_says_what_no_decoder_says_is_ended(said: Said, message: object, files: int, piece: bool) -> None:
    with nothing_left_open():
        assert said(message, files, piece=piece) is None
    said.process.end.assert_called_once()
    assert said.slot.process is None


@pytest.mark.parametrize(("message", "files", "piece"), [(DONE, 0, True), (FAILED, 0, True), (INDEXED, 1, False)])
def test_answers(said: Said, message: object, files: int, piece: bool) -> None:
    heard = said(message, files, piece=piece)
    assert isinstance(heard, tuple)
    answer = heard[1]
    assert isinstance(answer, Answer)
    assert (answer.message, len(answer.fds)) == (message, files)
    close_all(answer.fds)
    said.process.end.assert_not_called()
