"""Simulate the video decoders of one node, which decode a clip in pieces as `vllm_omni_sched.video.plan` does."""

from random import Random  # noqa: TID251 (the type of an argument)

from vllm_omni_sched.graph.order import INTERACTIVE, SlaClass
from vllm_omni_sched.sim.costs.base import DecoderCosts
from vllm_omni_sched.sim.kernel import Simulator
from vllm_omni_sched.sim.servers import QueueServer, SharedServer
from vllm_omni_sched.sim.work import Clip, Done, Job, Server
from vllm_omni_sched.video.pool.assignment import Assignment, IdleDecoder, PieceAssigner, WaitingPiece, WaitingVideo

PIECES_PER_DECODER = 6
TIMES_ITS_OVERHEAD = 20
"""Both as in `vllm_omni_sched.video.plan`; a test checks that the pieces are the same."""


def frames_of(clip: Clip) -> int:
    """Return the number of all frames, 1 or more."""
    return max(1, round(clip.seconds * clip.fps))


def wanted_of(clip: Clip) -> list[int]:
    """Return the numbers of the wanted frames, evenly spaced from the first to the last, each once."""
    frames = frames_of(clip)
    count = min(clip.wanted, frames)
    if count < 2:
        return [0] * count
    step = (frames - 1) / (count - 1)
    return [int(step * number) for number in range(count)]


def spans_of(clip: Clip) -> list[tuple[int, int]]:
    """Return the first and last frame of each group of pictures (GOP) with a wanted frame, up to the last of these."""
    spans: list[tuple[int, int]] = []
    for number in wanted_of(clip):
        first = number - number % clip.gop_frames
        if spans and spans[-1][0] == first:
            spans[-1] = first, number
        else:
            spans.append((first, number))
    return spans


def pieces_of(clip: Clip, costs: DecoderCosts, decoders: int) -> list[float]:
    """Return the seconds of one decoder for each piece of a clip, longest first.

    1. Each GOP with wanted frames is a piece, from its key frame to the last wanted frame.
    2. Adjacent pieces are joined, up to a decoder's share of the whole.
    """
    spans = spans_of(clip)
    begin = costs.piece_seconds
    each = [begin + costs.frames_seconds(clip, last - first + 1) for first, last in spans]
    share = min(sum(each) / (decoders * PIECES_PER_DECODER), TIMES_ITS_OVERHEAD * begin)
    joined: list[tuple[int, int]] = []
    spent = 0.0
    for (first, last), cost in zip(spans, each, strict=True):
        if joined and first <= joined[-1][1] + 1 and spent + cost <= share:
            joined[-1] = joined[-1][0], last
            spent += cost
        else:
            joined.append((first, last))
            spent = cost
    return sorted((begin + costs.frames_seconds(clip, last - first + 1) for first, last in joined), reverse=True)


def sought_seconds(clip: Clip, costs: DecoderCosts) -> float:
    """Return seconds of one decoder that seeks to the key frame before each wanted frame, and decodes from there."""
    return sum(costs.piece_seconds + costs.frames_seconds(clip, last - first + 1) for first, last in spans_of(clip))


def whole_seconds(clip: Clip, costs: DecoderCosts) -> float:
    """Return the seconds of one decoder that decodes the whole file, whatever is wanted.

    OpenCV's loop does that: it grabs every frame.
    """
    return costs.piece_seconds + costs.frames_seconds(clip, frames_of(clip))


LOADER_THREADS = 8
"""Threads of vLLM's media loader (VLLM_MEDIA_LOADING_THREAD_COUNT): so many files are read at once."""
FFMPEG_THREADS = 16
"""Most threads of OpenCV's FFmpeg for one file; it takes as many as there are processors."""
THREAD_GAIN = 0.8
"""Work that another thread adds, relative to a core: assumed. Stock vLLM took 2.59 s on 2 cores for a job of 4.75 s
on one (`benchmarks/video`, clip `h264-gop60`), which is 0.83."""

_NO_CLIP_SECONDS = 1e-9


class _Video:
    """A request, and the remaining pieces of its clips."""

    __slots__ = ("job", "key", "left", "open", "sla")

    def __init__(self, key: int, job: Job, left: dict[int, WaitingPiece], sla: SlaClass) -> None:
        self.key, self.job, self.left, self.sla = key, job, left, sla
        self.open = len(left)  # pieces not decoded yet, including running ones


class _Run:
    """A piece that a decoder is working on."""

    __slots__ = ("lent", "video")

    def __init__(self, video: _Video, lent: int) -> None:
        self.video, self.lent = video, lent


class VideoServer:
    """Decoders that share all clips of the node by the real `PieceAssigner`.

    1. A clip is cut into pieces (`pieces_of`); the pieces of all clips of a request are one video to the policy.
    2. When a decoder is free, or a video arrives, the policy assigns pieces to decoders.
    3. A piece with n threads takes its cost / (1 + ``thread_gain`` x (n - 1)).
    4. A request is done with its last piece; one without clips is done at once.
    5. A piece that begins on a decoder whose core is lent slows nobody down, though both then share cores.

    Args:
        decoders: cores, or engines of a GPU.
        kind: of them: ``cpu`` or ``nvdec``.
        threads: most that may work on a piece; 1 for engines of a GPU.
        thread_gain: what another thread adds of a core's work; assumed.
    """

    def __init__(
        self,
        sim: Simulator,
        done: Done,
        costs: DecoderCosts,
        decoders: int,
        kind: str = "cpu",
        threads: int = 1,
        thread_gain: float = THREAD_GAIN,
    ) -> None:
        self.share = PieceAssigner()
        self._sim, self._done, self._costs = sim, done, costs
        self._decoders, self._kind, self._threads, self._gain = decoders, kind, threads, thread_gain
        self._videos: dict[int, _Video] = {}
        self._keys: dict[Job, int] = {}
        self._free = dict.fromkeys(range(decoders))
        self._opened: dict[int, int] = {}  # decoder -> the video it worked on last
        self._runs: dict[int, _Run] = {}
        self._number = 0
        self._threads_used = 0
        self._busy, self._since = 0.0, 0.0

    @property
    def in_flight(self) -> int:
        return len(self._keys)

    def submit(self, job: Job) -> None:
        clips = [item.clip for item in job.request.items if item.clip is not None]
        costs = [cost for clip in clips for cost in pieces_of(clip, self._costs, self._decoders)]
        left = {number: WaitingPiece(number, cost, self._threads) for number, cost in enumerate(costs)}
        self._number += 1
        video = _Video(self._number, job, left, INTERACTIVE)
        self._videos[video.key] = video
        self._keys[job] = video.key
        if left:
            self._plan()
        else:
            self._sim.after(0.0, self._finish, video)

    def _plan(self) -> None:
        if not self._free:
            return
        waiting = [
            WaitingVideo(video.key, video.job.request.arrival, video.sla, self._kind, tuple(video.left.values()))
            for video in self._videos.values()
            if video.left
        ]
        if not waiting:
            return
        idle = [IdleDecoder(one, self._kind, self._opened.get(one)) for one in self._free]
        lent = sum(run.lent for run in self._runs.values())
        for take in self.share.plan(waiting, idle, {self._kind: self._decoders}, lent, self._sim.now):
            self._take(take)

    def _take(self, take: Assignment) -> None:
        video = self._videos[take.video]
        piece = video.left.pop(take.piece)
        del self._free[take.decoder]
        self._pass()
        self._threads_used += take.threads
        run = self._runs[take.decoder] = _Run(video, take.threads - 1)
        self._opened[take.decoder] = video.key
        self._sim.after(piece.cost / (1 + self._gain * run.lent), self._end, (take.decoder, run))

    def _end(self, ended: tuple[int, _Run]) -> None:
        decoder, run = ended
        if self._runs.get(decoder) is not run:  # it was killed
            return
        self._pass()
        self._threads_used -= 1 + run.lent
        del self._runs[decoder]
        self._free[decoder] = None
        run.video.open -= 1
        self._plan()
        if not run.video.open:
            self._finish(run.video)

    def _finish(self, video: _Video) -> None:
        if self._videos.pop(video.key, None) is None:  # it was withdrawn
            return
        del self._keys[video.job]
        video.job.first = self._sim.now
        self._done(video.job)

    def abort(self, job: Job) -> None:
        """Forget a job; its running pieces are still decoded, and no other piece is begun."""
        key = self._keys.pop(job, None)
        if key is not None:
            del self._videos[key]

    def kill(self) -> list[Job]:
        self._pass()
        self._threads_used = 0
        lost = list(self._keys)
        self._keys.clear()
        self._videos.clear()
        self._runs.clear()
        self._opened.clear()
        self._free = dict.fromkeys(range(self._decoders))
        return lost

    def _pass(self) -> None:
        """Add the busy time since the last call.

        A piece may begin on a decoder whose processor is lent to another one. There are more threads than processors
        then, but no more processors are busy than there are.
        """
        now = self._sim.now
        self._busy += (now - self._since) * min(self._threads_used, self._decoders)
        self._since = now

    def busy_seconds(self) -> dict[str, float]:
        self._pass()
        return {"decode": self._busy}


def stock_decoding(
    sim: Simulator,
    done: Done,
    costs: DecoderCosts,
    decoders: int,
    rng: Random,
    loaders: int = LOADER_THREADS,
    *,
    engines: bool = False,
) -> Server:
    """Return decoders that do not collaborate: each request is decoded separately, at most ``loaders`` at once.

    1. First come first served.
    2. On cores, OpenCV decodes a clip from start to end. Its FFmpeg has as many threads as cores, up to
       `FFMPEG_THREADS`, so clips that are decoded at once share the cores evenly.
    3. With ``engines``, those of a GPU, each request has one. As vLLM's ``pynvvideocodec`` seeks, only frames from a
       key frame to the last wanted one behind it are decoded.

    Args:
        decoders: cores, or engines.
    """
    of_clip = sought_seconds if engines else whole_seconds

    def seconds(job: Job, _: Random) -> float:
        return sum(of_clip(item.clip, costs) for item in job.request.items if item.clip is not None)

    def threads(clips: int) -> float:
        return min(FFMPEG_THREADS, decoders / clips)

    if not engines:
        return SharedServer(
            sim,
            done,
            lambda job, rng: seconds(job, rng) or _NO_CLIP_SECONDS,
            rng,
            "decode",
            speed=lambda clips: 1 + THREAD_GAIN * (threads(clips) - 1),
            units=lambda clips: clips * threads(clips),
            places=min(decoders, loaders),
        )

    return QueueServer(sim, done, min(decoders, loaders), seconds, rng, kind="decode")
