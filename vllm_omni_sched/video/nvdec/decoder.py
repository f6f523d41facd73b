"""A decoder session of a GPU behind the interface of decoders."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_omni_sched.clock import Clock, monotonic_seconds
from vllm_omni_sched.video.base import Decoder
from vllm_omni_sched.video.facts import NO_TIME, Order, PacketFlag, Piece, PieceResult, VideoIndex
from vllm_omni_sched.video.index import PtsOrder
from vllm_omni_sched.video.nvdec.bitstream import Framing, framing
from vllm_omni_sched.video.nvdec.colour import SPACES, Colours, nv12_to_rgb
from vllm_omni_sched.video.nvdec.first import first_frame
from vllm_omni_sched.video.nvdec.library import Frame, Library, NvdecError, Session
from vllm_omni_sched.video.nvdec.limits import Limits, Refusal, beyond, out_of_reach
from vllm_omni_sched.video.nvdec.slots import Device, DeviceSlots, HostSlots, Slots

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

_Kind = tuple[str, int, int, bytes]


class NvdecDecoder(Decoder):
    """A decoder session of a GPU. At most one session per engine runs at once (`limits.Limits.engines`).

    1. `open` refuses, with a reason, a video that a CPU would decode to other frames.
    2. `open` already begins the first video of a kind (codec, size, parameters), so that a session that cannot be
       created is known there.
    3. `decode` raises if the library fails or wanted frames are missing: the card hides damage, so damaged videos are
       decoded on CPUs.
    4. The session is kept for videos of the same kind, and never after an error.

    Args:
        gpu: CUDA's number of the GPU.
        on_device: whether frames stay on the device: then give `open` no memory, and read `frames`.
        library, device: replacements of the real ones, for tests.

    Raises:
        NvdecError: PyNvVideoCodec is not installed, or has no driver that it can use.
    """

    def __init__(
        self,
        gpu: int = 0,
        *,
        on_device: bool = False,
        library: Library | None = None,
        device: Device | None = None,
        clock: Clock = monotonic_seconds,
    ) -> None:
        self._library, self._device = library or Library(), device or Device(gpu)
        self._gpu, self._on_device, self._clock = gpu, on_device, clock
        self._limits: dict[tuple[str, str], Limits] = {}
        self._session: Session | None = None
        self._kind: _Kind | None = None
        self._index: VideoIndex | None = None
        self._packets = memoryview(b"")
        self._framing = Framing(0, b"")
        self._colours = Colours()
        self._slots: Slots | None = None
        self._frames: torch.Tensor | None = None

    @property
    def frames(self) -> torch.Tensor:
        """The decoded frames on the device: uint8 of shape (slots, height, width, 3), valid for slots found by
        `decode`.

        The tensor belongs to the caller, and can be sent by the CUDA IPC path without a copy.
        """
        if self._frames is None:
            raise ValueError("frames are on the host: construct the decoder with on_device=True")
        return self._frames

    def open(self, index: VideoIndex, packets: memoryview, frames: memoryview, slots: int = 0) -> None:
        """Open a video; see `Decoder.open`.

        Args:
            slots: number of frames in the tensor on the device, if frames stay there.

        Raises:
            NvdecError: a decoder on the CPU must decode this video, for the reason given.
        """
        self._forget()
        if (refusal := out_of_reach(index) or beyond(index, self._limits_for(index))) is not None:
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
        self._colours = first.colours
        self._device.use()
        self._index, self._packets = index, packets
        self._begin(index)
        sideways = index.rotation in (90, 270)
        size = (index.width, index.height) if sideways else (index.height, index.width)
        if self._on_device:
            self._frames = self._device.empty(slots, *size)
            self._slots = DeviceSlots(self._frames)
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
            raise ValueError("decode was called before open, or open got no memory for frames")
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
                    order.see(frame.pts)
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
        self._index, self._slots, self._frames = None, None, None
        self._packets = memoryview(b"")

    def _drop_session(self) -> None:
        self._session, self._kind = None, None
