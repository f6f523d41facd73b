"""Several decoders of one kind: a video shared by all of them, or a video for each."""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import json
import mmap
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.gpu.nvdec import WANTED
from benchmarks.gpu.nvdec.clips import Clip, digest
from benchmarks.harness.child import Child, ChildFailed
from vllm_omni_sched.video.facts import Piece
from vllm_omni_sched.video.frame_order import shown_frames
from vllm_omni_sched.video.plan import plan
from vllm_omni_sched.video.pool.messages import encode_index, encode_piece

MODULE = "benchmarks.gpu.nvdec.engine"


class Refused(Exception):
    """This machine, or this kind of decoder, cannot do it; says why."""


class Task(NamedTuple):
    """Frames wanted of a clip."""

    name: str
    wanted: list[int]


def tasks(clip: Clip) -> list[Task]:
    """Return the tasks of a clip: some frames, and all of them."""
    total = shown_frames(clip.index)
    whole = Task("all frames", list(range(total)))
    if total <= WANTED:
        return [whole]
    return [Task(f"{WANTED} frames", np.linspace(0, total - 1, WANTED, dtype=int).tolist()), whole]


def shares(pieces: Sequence[Piece], members: int) -> list[list[Piece]]:
    """Assign pieces to members, the longest first, each to the least loaded. Members without any are left out."""
    given: list[list[Piece]] = [[] for _ in range(members)]
    load = [(0.0, member) for member in range(members)]
    for piece in sorted(pieces, key=lambda piece: -piece.cost):
        cost, member = heapq.heappop(load)
        given[member].append(piece)
        heapq.heappush(load, (cost + piece.cost, member))
    return [mine for mine in given if mine]


class Crew(contextlib.ExitStack):
    """Decoders in processes, with memory for a video's frames for each.

    Args:
        kind: nvdec or cpu.
        gpus: of each member.
        room: bytes of the largest output.

    Raises:
        Refused: a member cannot work.
    """

    def __init__(self, kind: str, gpus: Sequence[int], room: int) -> None:
        super().__init__()
        self.kind, self._room = kind, room
        self._folder = Path(self.enter_context(tempfile.TemporaryDirectory(prefix="nvdec-", dir="/dev/shm")))
        frames = self._folder / "frames"
        with frames.open("wb") as file:
            file.truncate(room * len(gpus))
        with frames.open("r+b") as file:
            self._frames = mmap.mmap(file.fileno(), 0)
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self._members = [self.enter_context(Child(MODULE, [kind, str(gpu), str(frames)])) for gpu in gpus]
            for member in self._members:
                try:
                    answer = member.next_event()
                except ChildFailed as error:
                    raise Refused(str(error)[-600:]) from None
                if failed := answer.get("failed"):
                    raise Refused(failed)
            undo.pop_all()

    def latency(self, clip: Clip, task: Task, members: int) -> float:
        """Seconds until one video's frames are there, shared by so many members."""
        given = shares(self._plan(clip, task, members), members)
        folder = self._written(clip, task, given)
        for number in range(len(given)):
            self._tell(number, task="open", clip=str(folder), start=0, nbytes=self._room)
        self._answers(len(given))
        return self._timed(folder, given)

    def rate(self, clip: Clip, task: Task, members: int, videos: int) -> float:
        """Return videos per second when each member decodes ``videos`` of them alone."""
        given = [list(self._plan(clip, task, 1)) for _ in range(members)]
        folder = self._written(clip, task, given)
        for number in range(members):
            self._tell(number, task="open", clip=str(folder), start=number * self._room, nbytes=self._room)
        self._answers(members)
        return members * videos / self._timed(folder, [mine * videos for mine in given])

    def digests(self, clip: Clip, task: Task) -> list[str]:
        """Return the digests of the frames that `latency` decoded last."""
        height, width = clip.index.height, clip.index.width
        frames = np.frombuffer(self._frames, np.uint8, len(task.wanted) * height * width * 3)
        return [digest(frame) for frame in frames.reshape(-1, height, width, 3)]

    def clear(self, clip: Clip, task: Task) -> None:
        """Forget the frames that `latency` decoded last, so that nobody is credited with another's."""
        self._frames[: len(task.wanted) * clip.index.height * clip.index.width * 3] = bytes(
            len(task.wanted) * clip.index.height * clip.index.width * 3
        )

    def _plan(self, clip: Clip, task: Task, members: int) -> Sequence[Piece]:
        return plan(clip.index, task.wanted, members).pieces

    def _written(self, clip: Clip, task: Task, given: list[list[Piece]]) -> Path:
        """Write what members need to files, so that sending it is not timed."""
        key = hashlib.sha256(f"{clip.name}-{task.name}-{len(given)}".encode()).hexdigest()[:16]
        folder = self._folder / key
        folder.mkdir(exist_ok=True)
        (folder / "index").write_bytes(encode_index(clip.index))
        (folder / "packets").write_bytes(clip.packets)
        for mine in given:
            for piece in mine:
                (folder / f"piece{piece.number}").write_bytes(encode_piece(piece))
        return folder

    def _timed(self, folder: Path, given: list[list[Piece]]) -> float:
        begun = time.perf_counter()
        for number, mine in enumerate(given):
            self._tell(number, task="decode", clip=str(folder), pieces=[f"piece{piece.number}" for piece in mine])
        found = sum(answer["found"] for answer in self._answers(len(given)))
        seconds = time.perf_counter() - begun
        wanted = sum(len(piece.wanted) for mine in given for piece in mine)
        if found < wanted:
            raise Refused(f"{wanted - found} of {wanted} frames did not come out")
        return seconds

    def _tell(self, number: int, **request: Any) -> None:
        stdin = self._members[number].process.stdin
        assert stdin is not None
        stdin.write(json.dumps(request) + "\n")
        stdin.flush()

    def _answers(self, members: int) -> list[dict[str, Any]]:
        try:
            answers = [member.next_event() for member in self._members[:members]]
        except ChildFailed as error:
            raise Refused(str(error)[-600:]) from None
        for answer in answers:
            if failed := answer.get("failed"):
                raise Refused(failed)
        return answers
