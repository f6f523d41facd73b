"""Simulate decoding engines that work on pieces of videos; plan and assignment are those of the server."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from vllm_omni_sched.graph.order import INTERACTIVE
from vllm_omni_sched.video.facts import PACKET, PacketFlag, VideoIndex
from vllm_omni_sched.video.plan import Rates, plan
from vllm_omni_sched.video.pool.assignment import IdleDecoder, PieceAssigner, WaitingPiece, WaitingVideo

ENGINE = "engine"


@dataclass(frozen=True)
class Shape:
    """The properties of a video that decide its plan; it has 30 frames a second, of which two in three are B-frames."""

    seconds: int = 60
    gop: int = 60
    width: int = 1920
    height: int = 1080
    frame_bytes: int = 16_000  # 4 Mbit/s


def index_of(shape: Shape) -> VideoIndex:
    """Return its index: of each three frames the last is decoded first, and no frame needs the two before it."""
    count = shape.seconds * 30
    packets = np.zeros(count, PACKET)
    at = 0
    for start in range(0, count, shape.gop):
        frames = min(shape.gop, count - start)
        order = [0]
        for group in range(1, frames, 3):
            last = min(group + 2, frames - 1)
            order += [last, *range(group, last)]
        for place, frame in enumerate(order):
            droppable = place > 0 and frame % 3 != 0 and frame != frames - 1
            flags = PacketFlag.START if place == 0 else PacketFlag.DROPPABLE if droppable else 0
            packets[at] = (start + frame, at, at * shape.frame_bytes, shape.frame_bytes, flags)
            at += 1
    return VideoIndex(
        codec="h264",
        extradata=b"",
        width=shape.width,
        height=shape.height,
        rotation=0,
        pixel_format="yuv420p",
        time_base=(1, 30),
        header_frames=count,
        fps=30.0,
        duration_seconds=float(shape.seconds),
        packets=packets,
        in_file=True,
    )


def seconds_until_done(index: VideoIndex, wanted: list[int], engines: int, videos: int, rates: Rates) -> list[float]:
    """Return when each of ``videos`` equal videos that arrive together is decoded, in seconds, ascending."""
    assigner = PieceAssigner()
    pieces = plan(index, wanted, engines, rates).pieces
    left = {key: {piece.number: piece.cost for piece in pieces} for key in range(videos)}
    running = dict.fromkeys(left, 0)
    done: list[float] = []
    busy: list[tuple[float, int, int]] = []  # until when, which engine, whose piece
    idle = set(range(engines))
    now = 0.0
    while len(done) < videos:
        work = [
            WaitingVideo(key, 0.0, INTERACTIVE, ENGINE, tuple(WaitingPiece(n, cost) for n, cost in ones.items()))
            for key, ones in left.items()
            if ones
        ]
        for assignment in assigner.plan(
            work, [IdleDecoder(engine, ENGINE) for engine in sorted(idle)], {ENGINE: engines}, 0, now
        ):
            heapq.heappush(
                busy, (now + left[assignment.video].pop(assignment.piece), assignment.decoder, assignment.video)
            )
            idle.remove(assignment.decoder)
            running[assignment.video] += 1
        now, engine, video = heapq.heappop(busy)
        idle.add(engine)
        running[video] -= 1
        if not left[video] and not running[video]:
            done.append(now)
    return done
