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
from vllm_omni_sched.video import messages, wire
from vllm_omni_sched.video.facts import PieceResult
from vllm_omni_sched.video.job import Answer, Job, Task
from vllm_omni_sched.video.kinds import CPU
from vllm_omni_sched.video.team import Place, Team

READY = messages.Ready()
INDEXED = messages.Indexed(7, msgspec.Raw(b"\xc0"), 0.0)
DONE = messages.Done(7, PieceResult((), False, 0, 0.0, 0.0, 0))
FAILED = messages.Failed(7, messages.Failure.INPUT, "")


class Said:
    """A team of one, and what its process says."""

    def __init__(self) -> None:
        ours, theirs = wire.pair()
        self.process = mock.Mock(channel=wire.Channel(ours, messages.to_owner), **{"end.return_value": "ended"})
        self._end = wire.Channel(theirs, messages.to_worker)
        self.team = Team((actors.kind(1),), mock.Mock(), mock.Mock(), mock.Mock(), mock.Mock())
        self.place: Place = self.team.places[0]
        self.place.process, self.place.ready = self.process, True

    def __call__(self, message: object, files: int, *, piece: bool) -> object:
        """What comes of it, while the process has a task."""
        self.place.job = Job(0.0, REALTIME)
        self.place.task = Task(mock.Mock(), CPU, 0.0, needs_open=piece, number=7)
        with wire.closing_fd(os.memfd_create("x")) as fd:
            self._end.send(message, [fd] * files)
        return self.team.read(self.place)

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
    assert said.place.process is None


@pytest.mark.parametrize(("message", "files", "piece"), [(DONE, 0, True), (FAILED, 0, True), (INDEXED, 1, False)])
def test_answers(said: Said, message: object, files: int, piece: bool) -> None:
    heard = said(message, files, piece=piece)
    assert isinstance(heard, tuple)
    answer = heard[1]
    assert isinstance(answer, Answer)
    assert (answer.message, len(answer.fds)) == (message, files)
    wire.close_all(answer.fds)
    said.process.end.assert_not_called()
