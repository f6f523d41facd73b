"""`FlashCodec`, which decodes many videos at once with all decoders of the machine."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from vllm_omni_sched.clock import Clock, monotonic_seconds
from vllm_omni_sched.config.errors import VideoError
from vllm_omni_sched.connectors.lifetime import Lifetimes
from vllm_omni_sched.graph.order import INTERACTIVE, SlaClass
from vllm_omni_sched.logs import get_logger
from vllm_omni_sched.video.device_memory import DeviceFrames
from vllm_omni_sched.video.facts import VideoIndex
from vllm_omni_sched.video.frame_memory import FrameMemory
from vllm_omni_sched.video.load import Fallback, VideoLoad
from vllm_omni_sched.video.on_device import FramesReason
from vllm_omni_sched.video.options import VideoOptions
from vllm_omni_sched.video.pool.assignment import PieceAssigner
from vllm_omni_sched.video.pool.dispatcher import Dispatcher, Waker
from vllm_omni_sched.video.pool.job import Job
from vllm_omni_sched.video.pool.kinds import CPU, DecoderKind, decoder_kinds
from vllm_omni_sched.video.pool.process import ProcessSettings
from vllm_omni_sched.video.results import DecodedVideo, Observer

if TYPE_CHECKING:
    from vllm_omni_sched.connectors.cuda_ipc.driver import Driver

logger = get_logger(__name__)
_ALIVE = Lifetimes()
_inherited: list[DeviceFrames | None] = []  # memory of devices, which a forked child must not free
RETRY_SECONDS = 60.0  # after decoders of a kind could not be started
_KEEP_BYTES = 512 << 20  # memory of dropped frames that is kept for the next video
_KEEP_SECONDS = 10.0  # how long memory of frames beyond that is kept
READ_INDEX = "vllm_omni_sched.video.demux:read_index"


class FlashCodec:
    """Decodes videos. One instance per process suffices; many threads may use it at once.

    Its processes start with the first video, or with `start`, and end with `close`, or with this process. A forked
    child must not use it.

    Args:
        options: options of video decoding.
        clock: in seconds.
        observer: receives the events of decoding.
        kinds: kinds of decoders, the preferred one first; default: by the options and the hardware.
        read_index: ``module:name`` of the function that reads the index of a video, in a decoder process.
        place: whether frames stay on a device, or why not; see `on_device.of_server`.
        device: number of that device, which is the one that reads them.
        device_driver: replacement of torch's calls for it.

    Raises:
        OSError: shared memory cannot be allocated.
        ConfigError: the options ask for a kind of decoder that cannot work here.
    """

    def __init__(
        self,
        options: VideoOptions | None = None,
        *,
        clock: Clock = monotonic_seconds,
        observer: Observer | None = None,
        kinds: Sequence[DecoderKind] | None = None,
        read_index: str = READ_INDEX,
        place: FramesReason = FramesReason.OFF,
        device: int = 0,
        device_driver: Driver | None = None,
    ) -> None:
        self.options = options or VideoOptions()
        self._clock, self._observer = clock, observer or Observer()
        self._kinds = tuple(kinds) if kinds is not None else decoder_kinds(self.options)
        self._failed_at: dict[str, float] = {}  # kind -> when it could not be started
        waker = Waker()
        self._frames = FrameMemory(self.options.max_output_bytes, _KEEP_BYTES, waker.wake, _KEEP_SECONDS, clock)
        settings = ProcessSettings(
            self._frames.fd,
            self.options.worker_memory_bytes,
            self.options.max_input_bytes,
            self.options.nice,
            read_index,
            self._shared_frames,
        )
        self._place, self._device, self._device_driver = place, device, device_driver
        self._device_frames: DeviceFrames | None = None
        self._device_lock = threading.Lock()
        self._wake = waker.wake
        self._dispatcher = Dispatcher(
            self._kinds, settings, PieceAssigner(), clock, self._observer, waker, self._reclaim
        )
        _ALIVE.add(self)

    def start(self) -> None:
        """Start the decoders now, without waiting for them.

        If frames stay on a device, decoders on devices start with the first video: they map the memory of frames before
        they do anything else, and it is not allocated before.

        Raises:
            DecoderError: closed.
        """
        for kind in self._kinds:
            if kind.name == CPU or self._place is not FramesReason.ON_DEVICE:
                self._dispatcher.start(kind.name)

    def load(
        self,
        data: bytes | memoryview,
        choose: Callable[[VideoIndex], Iterable[int]],
        *,
        deadline_seconds: float | None = None,
        sla: SlaClass = INTERACTIVE,
        recovery: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> DecodedVideo:
        """Decode the wanted frames of a video.

        Args:
            data: a video file.
            choose: returns the numbers of the wanted frames in display order; called in this thread, once the video
                is indexed. Its exceptions are passed on.
            deadline_seconds: time limit from now; default: the option's.
            sla: class of the request, by which videos are ordered.
            recovery: whether a frame that cannot be decoded is replaced by the next decodable one, if that comes
                before the next wanted frame.
            progress: called in this thread with the numbers of decoded and of wanted frames.

        Raises:
            VideoInputError: it cannot be read, or none of the wanted frames can be decoded.
            VideoLimitError: it exceeds the limits of the options.
            VideoDeadlineError: it was not decoded in time, or there was no room for its frames.
            DecoderError: no decoder can decode it, none can be started, or this service was closed.
        """
        began = self._clock()
        kind = self._kind(began)
        if kind.name != CPU and self._place is FramesReason.ON_DEVICE:
            self._memory_on_device()  # before any decoder on a device starts
        job = Job(began, sla)
        load = VideoLoad(
            job,
            self._dispatcher,
            self._frames,
            self.options.limits,
            self._clock,
            began + (self.options.deadline_seconds if deadline_seconds is None else deadline_seconds),
            kind.name,
            len(kind.devices),
            progress,
            device_frames=self._device_frames_for(kind),
        )
        try:
            decoded = load.run(data, choose, recovery)
        except VideoError as error:
            self._observer.failed(error)
            raise
        finally:
            self._dispatcher.finish(job)
        if Fallback.DECODER_ABSENT.value in decoded.report.fallbacks:
            self._failed_at[kind.name] = self._clock()
        self._observer.loaded(decoded.report)
        return decoded

    def _device_frames_for(self, kind: DecoderKind) -> Callable[[], DeviceFrames | FramesReason] | None:
        if self._place is FramesReason.OFF:
            return None
        if kind.name == CPU and self._place is FramesReason.ON_DEVICE:
            return lambda: FramesReason.NO_ENGINES
        return self._memory_on_device

    def _memory_on_device(self) -> DeviceFrames | FramesReason:
        """Return the memory for frames that stay on a device, allocated with the first video, or why there is none."""
        with self._device_lock:
            if self._place is FramesReason.ON_DEVICE and self._device_frames is None:
                try:
                    self._device_frames = DeviceFrames(
                        self._device, self.options.device_bytes, self._wake, self._device_driver, self._clock
                    )
                except MemoryError as error:
                    self._place = FramesReason.NO_MEMORY
                    logger.warning(
                        "video decoding: frames go to the host, because %d bytes for them on GPU %d cannot be had: %s; "
                        "lower option 'device_bytes', or free memory of that GPU",
                        self.options.device_bytes,
                        self._device,
                        error,
                    )
            return self._device_frames or self._place

    def _shared_frames(self) -> bytes:
        return self._device_frames.shared if self._device_frames is not None else b""

    def _reclaim(self) -> bool:
        if self._device_frames is not None:
            self._device_frames.reclaim()
        return self._frames.reclaim()

    def _kind(self, now: float) -> DecoderKind:
        """Return the preferred kind that has not failed to start recently: each attempt takes seconds."""
        *preferred, last = self._kinds
        return next((k for k in preferred if now - self._failed_at.get(k.name, -math.inf) > RETRY_SECONDS), last)

    @property
    def alive(self) -> bool:
        """Return whether it accepts videos; once it does not, it never will again."""
        return self._dispatcher.alive

    def close(self) -> None:
        """End all processes; loads under way raise. Decoded frames stay valid. Idempotent."""
        self._dispatcher.close()
        self._frames.close()
        if self._device_frames is not None:
            self._device_frames.close()

    def abandon(self) -> None:
        """Release descriptors in a forked child, in place of `close`: all else belongs to its parent."""
        self._dispatcher.abandon()
        self._frames.abandon()
        _inherited.append(self._device_frames)

    def __enter__(self) -> FlashCodec:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
