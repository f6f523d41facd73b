"""Decodes pieces with FFmpeg's software decoders, through PyAV."""

from __future__ import annotations

import contextlib
import errno
from typing import TYPE_CHECKING, Any

import av
import av.subtitles.stream  # PyAV loads it with the first file, when a decoder process may have too little memory
import numpy as np
from av.packet import PacketSideData

from vllm_omni_sched.clock import Clock, monotonic_seconds
from vllm_omni_sched.config.errors import DecoderError
from vllm_omni_sched.video.decoders.base import Decoder
from vllm_omni_sched.video.decoders.convert import Converter
from vllm_omni_sched.video.facts import NO_TIME, Order, PacketFlag, PieceResult
from vllm_omni_sched.video.frame_order import PtsOrder, reorder_depth

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt
    from av.video.codeccontext import VideoCodecContext

    from vllm_omni_sched.video.facts import DeviceRange, Piece, VideoIndex

_SILENT_WITH_THREADS = {"mpeg4", "vp8"}
"""Codecs for which several threads decode damaged packets to other frames than one thread, without an error."""

_HARMLESS_ERROR = "mmco: unref short failure"
"""Error of H.264 behind the start of an open GOP: a reference from before it is released. It is harmless."""

_FRAME_BYTES = 8  # most bytes per pixel, with a codec's own data

_PALETTE, _NEW_EXTRADATA = 0, 1  # AV_PKT_DATA_PALETTE and so on


class _Hidden:
    """Marks a packet, and so its frame, as hidden. One object per packet: PyAV drops a mark with its first packet."""


class PyAvDecoder(Decoder):
    """Decodes on the CPU. Sets FFmpeg's log level while it decodes, because FFmpeg reports damage in its log.

    Args:
        clock: measures the stages, in seconds.
    """

    def __init__(self, clock: Clock = monotonic_seconds) -> None:
        self._clock = clock
        self._index: VideoIndex | None = None
        self._reorder = 0
        self._packets = memoryview(b"")
        self._slots: npt.NDArray[np.uint8] = np.empty((0, 0, 0, 3), np.uint8)
        self._converter = Converter()

    def open(self, index: VideoIndex, packets: memoryview, frames: memoryview | DeviceRange) -> None:
        """Open a video; see `Decoder.open`."""
        self.close()
        if not isinstance(frames, memoryview):
            raise DecoderError("a decoder on the CPU does not write into the memory of a device")
        self._index = index
        self._reorder = max(index.reorder, reorder_depth(index.packets))
        self._context(1, index.reorder)  # raises if there is no such decoder
        self._packets = packets
        height, width = output_size(index)
        slots = frames.nbytes // (height * width * 3)
        self._slots = np.frombuffer(frames, np.uint8, slots * height * width * 3).reshape(slots, height, width, 3)

    def decode(self, piece: Piece) -> PieceResult:
        """Decode a piece; see `Decoder.decode`."""
        if self._index is None:
            raise DecoderError("a piece cannot be decoded, because its video is not open in this decoder")
        run = _PieceRun(self._index, piece, self._slots, self._converter, self._clock)
        # A decoder that begins in the middle does not know yet how many frames it must hold back. One that begins with
        # the first packet holds back as many as any plain decoder, even if times are damaged.
        context = self._context(run.threads, self._reorder if piece.feed[0] else self._index.reorder)
        began = self._clock()
        with _captured_errors(run.threads) as errors:
            try:
                for number in piece.feed.tolist():
                    run.feed(context, self._packet(number), errors)
                    if run.done:
                        break
                else:
                    run.feed(context, None, errors)
            finally:
                context.flush_buffers()  # after this its threads are idle, and log nothing more
        seconds = self._clock() - began - run.convert_seconds
        return PieceResult(
            tuple(run.found),
            run.damaged,
            run.decoded,
            seconds,
            run.convert_seconds,
            run.bytes_written,
            run.pts_order.broken,
            tuple(run.numbers),
        )

    def close(self) -> None:
        """Close the video; see `Decoder.close`."""
        self._index = None
        self._packets = memoryview(b"")
        self._slots = np.empty((0, 0, 0, 3), np.uint8)
        self._converter.end_video()

    def _packet(self, number: int) -> av.Packet[Any]:
        assert self._index is not None
        pts, dts, offset, nbytes, flags = self._index.packets[number].item()
        packet = av.Packet(nbytes)  # with the padding that decoders may read
        packet.update(self._packets[offset : offset + nbytes])  # type: ignore[arg-type] # any buffer will do
        packet.pts = None if pts == NO_TIME else pts
        packet.dts = None if dts == NO_TIME else dts
        if flags & PacketFlag.HIDDEN:  # marked by packet, because another edit may show a frame of the same pts
            packet.opaque = _Hidden()
        changes = (_PALETTE, self._index.palettes), (_NEW_EXTRADATA, self._index.extradata_changes)
        for kind, contents in changes:
            for changed_at, content in contents:
                if changed_at == number:
                    data = PacketSideData(kind, len(content))  # type: ignore[call-arg] # missing in PyAV's hints
                    memoryview(data)[:] = content
                    packet.set_sidedata(data)
        return packet

    def _context(self, threads: int, reorder: int) -> VideoCodecContext:
        """Return a decoder in the state of a container's decoder before its first packet."""
        index = self._index
        assert index is not None
        try:
            context = av.CodecContext.create(index.decoder or index.codec, "r")
        except ValueError as error:  # FFmpeg was built without this decoder
            raise DecoderError(f"codec {index.codec}: FFmpeg has no decoder for it here ({error})") from None
        assert isinstance(context, av.VideoCodecContext)
        if index.extradata:
            context.extradata = index.extradata
        if index.codec_tag and index.codec_tag.isascii():
            context.codec_tag = index.codec_tag
        context.width, context.height = index.width, index.height
        if index.pixel_format:
            context.pix_fmt = index.pixel_format
        if index.bits_per_sample:
            context.bits_per_coded_sample = index.bits_per_sample
        context.reorder_depth = reorder
        context.copy_opaque = True  # from packets to their frames
        context.thread_count = threads
        context.thread_type = "AUTO"
        return context


class _PieceRun:
    """Decodes one piece."""

    def __init__(
        self, index: VideoIndex, piece: Piece, slots: npt.NDArray[np.uint8], converter: Converter, clock: Clock
    ) -> None:
        pts = index.packets["pts"]
        # with an open GOP, frames shown before its start follow it, and need earlier frames to be decoded
        self._from_pts = NO_TIME if piece.feed[0] == 0 else int(pts[piece.feed[0]])
        self._expected = "" if piece.feed[0] == 0 else _HARMLESS_ERROR
        alone = index.codec in _SILENT_WITH_THREADS or (pts[piece.feed] < self._from_pts).any()
        self.threads = 1 if alone else piece.threads
        self._order = piece.order
        self._wanted = {one.frame if one.pts is None else one.pts: one for one in piece.wanted}
        self._keys: dict[int, list[int]] = {}  # slot -> keys in `_wanted`
        for key, one in self._wanted.items():
            self._keys.setdefault(one.slot, []).append(key)
        self._slots = slots
        self._converter = converter
        self._rotation = index.rotation
        self._clock = clock
        self._shown = 0
        self.pts_order = PtsOrder(self._from_pts)
        self.found: list[int] = []
        self.numbers: list[int] = []
        self.damaged = False
        self.decoded = 0
        self.convert_seconds = 0.0
        self.bytes_written = 0

    @property
    def done(self) -> bool:
        """Return whether all wanted frames are decoded."""
        return not self._wanted

    def feed(
        self, context: VideoCodecContext, packet: av.Packet[Any] | None, errors: list[tuple[int, str, str]]
    ) -> None:
        """Decode a packet, or None to flush the decoder; keep the wanted frames."""
        matters = packet is None or packet.pts is None or packet.pts >= self._from_pts
        frames: list[av.VideoFrame] = []
        try:
            frames = context.decode(packet)
            failed = False
        except av.FFmpegError as error:
            _check_memory(error)
            failed = True
        failed |= any(message.strip() != self._expected for _, _, message in errors)
        if failed:
            _check_memory_left(context.width * context.height)
        self.damaged |= matters and failed
        errors.clear()
        for frame in frames:
            self._keep_if_wanted(frame)

    def _keep_if_wanted(self, frame: av.VideoFrame) -> None:
        self.decoded += 1
        pts = frame.pts
        if isinstance(frame.opaque, _Hidden):
            return
        if self._order is Order.PTS:
            self.pts_order.check(pts)
            one = self._wanted.pop(pts, None) if pts is not None else None
        else:
            one = self._wanted.pop(self._shown, None)
            self._shown += 1
        if one is None:
            return
        began = self._clock()
        try:
            self.bytes_written += self._converter.convert(frame, self._slots[one.slot], self._rotation)
        except av.FFmpegError as error:  # only this frame is missing
            _check_memory(error)
            self.damaged = True
        else:
            self.damaged |= frame.is_corrupt
            self.found.append(one.slot)
            self.numbers.append(one.frame)
            for key in self._keys[one.slot]:
                self._wanted.pop(key, None)
        self.convert_seconds += self._clock() - began


def output_size(index: VideoIndex) -> tuple[int, int]:
    """Return height and width of the output frames, in pixels."""
    return (index.width, index.height) if index.rotation in (90, 270) else (index.height, index.width)


def _check_memory(error: av.FFmpegError) -> None:
    """Raise `MemoryError` for a shortage of memory, which is not damage of the video.

    Raises:
        MemoryError: there was too little memory.
    """
    if error.errno == errno.ENOMEM:
        raise MemoryError from None


def _check_memory_left(pixels: int) -> None:
    """Check for memory for one more frame: codecs often report its lack as damage, such as H.264's "no frame!".

    Raises:
        MemoryError: there is too little memory.
    """
    np.empty(_FRAME_BYTES * pixels, np.uint8)  # reserves addresses only


@contextlib.contextmanager
def _captured_errors(threads: int) -> Iterator[list[tuple[int, str, str]]]:
    """Capture FFmpeg's errors in its log: those of this thread, or of all if it decodes with several."""
    level = av.logging.get_level()
    av.logging.set_level(av.logging.ERROR)
    av.logging.set_skip_repeated(False)
    try:
        with av.logging.Capture(threads == 1) as errors:
            yield errors
    finally:
        av.logging.set_level(level)
