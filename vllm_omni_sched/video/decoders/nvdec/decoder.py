"""The decoder of videos on a GPU, and the look at a video's first frame that it needs.

NVDEC returns samples without their meaning, so the first frame is decoded on the CPU.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vllm_omni_sched.clock import Clock, monotonic_seconds
from vllm_omni_sched.video.decoders.base import Decoder
from vllm_omni_sched.video.decoders.nvdec.colour import SPACES, Colours, nv12_to_rgb
from vllm_omni_sched.video.decoders.nvdec.device import Device, DeviceSlots, HostSlots
from vllm_omni_sched.video.decoders.nvdec.framing import Framing, framing
from vllm_omni_sched.video.decoders.nvdec.library import Frame, Library, NvdecError, Session
from vllm_omni_sched.video.decoders.nvdec.limits import Limits, Refusal, refusal_by_index, refusal_by_limits
from vllm_omni_sched.video.device_memory import SCRATCH_BYTES, DeviceFramesView
from vllm_omni_sched.video.facts import NO_TIME, DeviceRange, Order, PacketFlag, Piece, PieceResult, VideoIndex
from vllm_omni_sched.video.frame_order import PtsOrder

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from vllm_omni_sched.connectors.cuda_ipc.driver import Driver

_SessionKind = tuple[str, int, int, bytes]
_FULL_RANGE = 2  # AVCOL_RANGE_JPEG


class NvdecDecoder(Decoder):
    """Decodes on one NVDEC engine of a GPU. At most one session per engine runs at once (`limits.Limits.engines`).

    1. `open` refuses, with a reason, a video that a CPU would decode to other frames.
    2. `open` already begins the first video of a kind (codec, size, parameters), so that a session that cannot be
       created is known there.
    3. `decode` raises if the library fails or wanted frames are missing: the card hides damage, so damaged videos are
       decoded on CPUs.
    4. The session is kept for videos of the same kind, and never after an error.

    Args:
        gpu: CUDA's number of the GPU.
        library, device, frames_driver: replacements of the real ones, for tests.

    Raises:
        NvdecError: PyNvVideoCodec is not installed, or has no driver that it can use.
    """

    def __init__(
        self,
        gpu: int = 0,
        *,
        library: Library | None = None,
        device: Device | None = None,
        frames_driver: Driver | None = None,
        clock: Clock = monotonic_seconds,
    ) -> None:
        self._library, self._device = library or Library(), device or Device(gpu)
        self._gpu, self._clock = gpu, clock
        self._limits: dict[tuple[str, str], Limits] = {}
        self._session: Session | None = None
        self._kind: _SessionKind | None = None
        self._index: VideoIndex | None = None
        self._packets = memoryview(b"")
        self._framing = Framing(0, b"")
        self._colours = Colours()
        self._slots: HostSlots | DeviceSlots | None = None
        self._frames_driver = frames_driver
        self._device_frames: DeviceFramesView | None = None

    def map_device_frames(self, shared: bytes) -> float:
        """Map the memory of frames on a device; see `Decoder.map_device_frames`."""
        self._device.use()
        view = DeviceFramesView(shared, self._frames_driver)
        self._device_frames = view
        return view.link_bytes_per_second(self._device.scratch(SCRATCH_BYTES), self._device.finish, self._clock)

    def open(self, index: VideoIndex, packets: memoryview, frames: memoryview | DeviceRange) -> None:
        """Open a video; see `Decoder.open`.

        Raises:
            NvdecError: a decoder on the CPU must decode this video, for the reason given.
        """
        self._forget()
        if (refusal := refusal_by_index(index) or refusal_by_limits(index, self._limits_for(index))) is not None:
            raise NvdecError(refusal, f"{index.codec} {index.pixel_format}, {index.width}x{index.height}")
        try:
            self._framing = framing(index.codec, index.extradata)
        except ValueError as error:
            raise NvdecError(Refusal.FAILED, str(error)) from None
        first = first_frame(index, packets)
        if first is None:
            raise NvdecError(Refusal.FAILED, "its first frame cannot be decoded")
        if self._framing.interlaced or first.interlaced:
            raise NvdecError(Refusal.INTERLACED, "the stream may hold fields")
        if first.pixel_format != index.pixel_format or first.colours.space not in SPACES:
            raise NvdecError(Refusal.FORMAT, f"frames are {first.pixel_format}, colour matrix {first.colours.space}")
        if first.recoloured:
            raise NvdecError(Refusal.FORMAT, "primaries or transfer of its frames are to be converted")
        self._colours = first.colours
        self._device.use()
        self._index, self._packets = index, packets
        self._begin(index)
        sideways = index.rotation in (90, 270)
        size = (index.width, index.height) if sideways else (index.height, index.width)
        if isinstance(frames, DeviceRange):
            if self._device_frames is None:
                raise NvdecError(Refusal.NO_DEVICE, "its frames lie on a device whose memory is not mapped here")
            self._slots = DeviceSlots(self._device_frames.room(*frames), *size, self._device)
        elif len(frames):
            self._slots = HostSlots(frames, *size, self._device)

    def decode(self, piece: Piece) -> PieceResult:
        """Decode a piece; see `Decoder.decode`.

        ``decode_seconds`` and ``convert_seconds`` are times of this thread, which waits for part of the card's work
        only at the end of the piece; that wait counts as conversion.

        Raises:
            NvdecError: the library failed, or wanted frames are missing.
        """
        index, slots = self._index, self._slots
        if index is None or (slots is None and piece.wanted):
            raise ValueError(
                "a piece cannot be decoded, because its video is not open in this decoder, or was opened without memory"
            )
        begin, converting = self._clock(), 0.0
        found: list[int] = []
        decoded = 0
        wanted = {w.frame if piece.order is Order.SEQUENCE or w.pts is None else w.pts: w.slot for w in piece.wanted}
        order = PtsOrder(int(index.packets["pts"][piece.feed[0]]) if len(piece.feed) and piece.feed[0] else NO_TIME)
        session = self._begin(index)
        try:
            for number, frame in enumerate(self._run(session, index, piece.feed.tolist())):
                decoded += 1
                if piece.order is Order.PTS:
                    order.check(frame.pts)
                slot = wanted.get(number if piece.order is Order.SEQUENCE else frame.pts)
                if slot is not None and slots is not None:
                    before = self._clock()
                    slots.put(slot, self._rgb(index, frame))
                    converting += self._clock() - before
                    found.append(slot)
            before = self._clock()
            if slots is not None:
                slots.finish()
            converting += self._clock() - before
            if len(found) < len(wanted):
                lost = len(wanted) - len(found)
                raise NvdecError(Refusal.INCOMPLETE, f"{lost} of {len(wanted)} frames are missing")
        except NvdecError:
            self._drop_session()
            raise
        nbytes = len(found) * index.width * index.height * 3
        whole = self._clock() - begin
        return PieceResult(tuple(found), False, decoded, whole - converting, converting, nbytes, order.broken)

    def close(self) -> None:
        self._forget()
        self._drop_session()

    def _limits_for(self, index: VideoIndex) -> Limits:
        key = (index.codec, index.pixel_format)
        if key not in self._limits:
            self._limits[key] = self._library.limits(self._gpu, *key)
        return self._limits[key]

    def _begin(self, index: VideoIndex) -> Session:
        """Return the session for this kind of video; a new one decodes the first packet, to raise its errors here."""
        kind = (index.codec, index.width, index.height, index.extradata)
        if self._session is not None and kind == self._kind:
            return self._session
        self._drop_session()
        session = self._library.session(self._gpu, index.codec)
        starts = (index.packets["flags"] & PacketFlag.START).nonzero()[0]
        for _ in self._run(session, index, starts[:1].tolist()):
            pass
        self._session, self._kind = session, kind
        return session

    def _run(self, session: Session, index: VideoIndex, feed: Iterable[int]) -> Iterable[Frame]:
        begins = True
        for at in feed:
            row = index.packets[at]
            start, nbytes = int(row["offset"]), int(row["nbytes"])
            data = self._framing.packet(self._packets[start : start + nbytes], begins)
            begins = False
            yield from session.feed(data, int(row["pts"]))
        yield from session.finish()

    def _rgb(self, index: VideoIndex, frame: Frame) -> torch.Tensor:
        picture = frame.picture
        if tuple(picture.shape) != (index.height * 3 // 2, index.width):
            raise NvdecError(Refusal.FORMAT, f"a decoded frame has the shape {tuple(picture.shape)}")
        rgb = nv12_to_rgb(picture, self._colours)
        return rgb.rot90(-(index.rotation // 90)) if index.rotation else rgb

    def _forget(self) -> None:
        self._index, self._slots = None, None
        self._packets = memoryview(b"")

    def _drop_session(self) -> None:
        self._session, self._kind = None, None


class FirstFrame(NamedTuple):
    """Properties of the first frame: FFmpeg's name of the pixel format, colours, whether it consists of fields, and
    whether its primaries or transfer are converted.
    """

    pixel_format: str
    colours: Colours
    interlaced: bool = False
    recoloured: bool = False


def first_frame(index: VideoIndex, packets: memoryview) -> FirstFrame | None:
    """Decode the first packet that is a start, by FFmpeg; return None if that gives no frame.

    Without PyAV, the index's pixel format is returned, with an unspecified matrix.
    """
    if not find_spec("av"):
        return FirstFrame(index.pixel_format, Colours(2, index.pixel_format.startswith("yuvj")))
    import av

    from vllm_omni_sched.video.decoders.convert import is_recoloured

    starts = np.flatnonzero(index.packets["flags"] & PacketFlag.START)
    if not len(starts):
        return None
    row = index.packets[starts[0]]
    at = int(row["offset"])
    try:
        context: Any = av.CodecContext.create(index.decoder or index.codec, "r")
        context.extradata = index.extradata or None
        context.thread_count = 1
        frames = [*context.decode(av.Packet(bytes(packets[at : at + int(row["nbytes"])]))), *context.decode(None)]
    except (av.FFmpegError, ValueError):
        return None
    for frame in frames:
        full = frame.color_range == _FULL_RANGE or frame.format.name.startswith("yuvj")
        colours = Colours(int(frame.colorspace), full)
        return FirstFrame(frame.format.name, colours, frame.interlaced_frame, is_recoloured(frame))
    return None
