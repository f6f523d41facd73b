"""Reads a video's index: its packets, without decoding one. Needs PyAV, and reads untrusted bytes."""

from __future__ import annotations

import mmap
import os
import re
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

import av
import numpy as np
from av.stream import Discard

from vllm_omni_sched.config.errors import VideoInputError
from vllm_omni_sched.video.bitstream import PacketFacts, PacketReader, reader_for
from vllm_omni_sched.video.bitstream.bits import EndOfBits
from vllm_omni_sched.video.facts import NO_TIME, PACKET, Order, SequenceReason, VideoIndex
from vllm_omni_sched.video.frame_order import display_ranks, order_of, packet_flags

if TYPE_CHECKING:
    from collections.abc import Iterator

    from av.container import InputContainer
    from av.video.codeccontext import VideoCodecContext
    from av.video.stream import VideoStream

    from vllm_omni_sched.video.options import Limits

_FORMATS = (
    "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,mpegts,mpeg,mpegvideo,avi,flv,live_flv,ogg,asf,rm,nut,mxf,gif,apng,ivf,obu,"
    "h264,hevc,vvc,m4v,h263,mjpeg,av1,vc1,dv,wtv,swf,yuv4mpegpipe"
)
"""Supported containers. Excluded are playlists and other formats that name files, and devices and pictures."""

_BY_LENGTH = {"h264", "hevc", "vvc"}  # with lengths of NAL units if their parameters begin with a version, as in MP4
_HEAD_BYTES = 32  # more than the headers that containers write before a packet
_MOST_NEW_STREAMS = 64
_OPTIONS = {"protocol_whitelist": "fd", "format_whitelist": _FORMATS}
_STREAM = re.compile(r" *Stream #0:(\d+)")
_ROTATION = re.compile(r" +(?:Display Matrix|displaymatrix): rotation of (-?[\d.]+|nan) degrees\s*")


class Indexed(NamedTuple):
    """An index, and the location of the packets' bytes.

    Attributes:
        packets_fd: a new memfd that holds the packets, for the caller to close; None if they are in the file
            (`VideoIndex.in_file`).
    """

    video: VideoIndex
    packets_fd: int | None


def read_index(fd: int, limits: Limits | None = None) -> Indexed:
    """Read the packets of the first video stream of a file.

    Args:
        fd: descriptor of the file or memfd; it must be seekable. Its offset is moved.
        limits: checked as soon as the file reveals the figures; None for no limits.

    Raises:
        VideoInputError: the container is not supported, has no video stream, or no packets.
        VideoLimitError: the video exceeds ``limits``.
    """
    size = os.fstat(fd).st_size
    if not size:
        raise VideoInputError("video: the file is empty; send the bytes of a video file")
    os.lseek(fd, 0, os.SEEK_SET)
    try:
        container = av.open("fd:", options={"fd": str(fd), **_OPTIONS}, metadata_errors="replace")
    except (av.FFmpegError, ValueError) as error:
        raise VideoInputError(f"video: the file is not a readable video ({reason_of(error)})") from None
    with container, mmap.mmap(fd, size, prot=mmap.PROT_READ) as file:
        if not container.streams.video:
            raise VideoInputError("video: the file has no video stream; send audio as audio")
        stream = container.streams.video[0]
        _check_header(stream, container, limits)
        return _read(container, stream, file, limits)


def _read(container: InputContainer, stream: VideoStream, file: mmap.mmap, limits: Limits | None) -> Indexed:
    context = stream.codec_context
    extradata = context.extradata or b""
    codec = context.codec.canonical_name
    notes: list[str] = []
    try:
        reader = reader_for(codec, extradata)
    except (EndOfBits, IndexError):
        reader = None
        notes.append("the codec's parameters are damaged")
    found = _Packets(file, reader, limits)
    try:
        for other in container.streams:
            if other.index != stream.index:
                other.discard = Discard.all
        partial = False
        for packet in _demuxed(container, stream, notes):
            found.add(packet)
            partial = packet.is_corrupt
        # The file may end within its last packet. FFmpeg decodes what is there, except NAL units of a stated length.
        by_length = codec in _BY_LENGTH and extradata[:1] == b"\1"
        if partial and len(found.rows) > 1 and (by_length or found.facts[-1].irregular):
            found.drop_last()
    except av.FFmpegError as error:  # the packets read up to here are kept
        notes.append(f"the file ends early ({reason_of(error)})")
    except BaseException:
        found.abandon()
        raise
    if not found.rows:
        found.abandon()
        raise VideoInputError("video: the video stream has no frames")
    packets = np.array(found.rows, PACKET)
    packets["flags"] = packet_flags(found.facts, found.hidden)
    frames = sum(fact.frames for fact, hidden in zip(found.facts, found.hidden, strict=True) if not hidden)
    irregular = bool(found.extradata_changes or found.palettes) or any(fact.irregular for fact in found.facts)
    display = display_ranks(found.facts)
    order, why = order_of(packets, known=reader is not None, irregular=irregular, display=display)
    if container.format.name == "avi" and context.reorder_depth:
        order, why = Order.SEQUENCE, SequenceReason.NO_PTS  # its times are decoding times, although they are called pts
    time_base = stream.time_base or Fraction(1, av.time_base)
    index = VideoIndex(
        codec=codec,
        extradata=extradata,
        width=context.width,
        height=context.height,
        rotation=_rotation(container, stream),
        pixel_format=context.pix_fmt or "",
        time_base=(time_base.numerator, time_base.denominator),
        header_frames=stream.frames,
        fps=_rate(stream.guessed_rate),
        mean_fps=_rate(stream.average_rate),
        duration_seconds=(container.duration or 0) / av.time_base,
        packets=packets,
        in_file=found.copy_fd is None,
        reorder=context.reorder_depth,
        order=order,
        why_sequence=why,
        notes=tuple(notes),
        decoder=context.name if context.name != codec else "",
        codec_tag=_tag(context),
        bits_per_sample=context.bits_per_coded_sample,
        extradata_changes=tuple(found.extradata_changes),
        palettes=tuple(found.palettes),
        stream_duration_seconds=_stream_seconds(stream),
        frames=frames if frames != len(packets) - sum(found.hidden) else 0,
    )
    return Indexed(index, found.copy_fd)


def _demuxed(container: InputContainer, stream: VideoStream, notes: list[str]) -> Iterator[av.Packet[Any]]:
    """Yield the stream's packets. If another stream begins in the middle of the file, PyAV stops and is asked again."""
    for _ in range(_MOST_NEW_STREAMS):
        try:
            yield from (packet for packet in container.demux(stream) if packet.size)
            return
        except (
            IndexError
        ):  # raised for a packet whose stream was not known when demuxing began; no packet of ours is lost
            continue
    notes.append(
        f"more than {_MOST_NEW_STREAMS} streams begin in the middle of the file; the video was read up to there"
    )


class _Packets:
    """Collects packets. Their bytes are located in the file; once some are not there, all packets are copied."""

    def __init__(self, file: mmap.mmap, reader: PacketReader | None, limits: Limits | None) -> None:
        self._file = file
        self._reader = reader
        self._limits = limits
        self.rows: list[tuple[int, int, int, int, int]] = []
        self.facts: list[PacketFacts] = []
        self.hidden: list[bool] = []
        self.extradata_changes: list[tuple[int, bytes]] = []
        self.palettes: list[tuple[int, bytes]] = []
        self.copy_fd: int | None = None
        self._copied = 0

    def add(self, packet: av.Packet[Any]) -> None:
        if self._limits is not None:
            self._limits.check_frames(len(self.rows) + 1)
        data = bytes(packet)
        for side in packet.iter_sidedata():
            if side.data_type == "new_extradata":
                self.extradata_changes.append((len(self.rows), bytes(side)))
            elif side.data_type == "palette":
                self.palettes.append((len(self.rows), bytes(side)))
        pts, dts = packet.pts, packet.dts
        offset = self._place(data, packet.pos)
        self.rows.append(
            (NO_TIME if pts is None else pts, NO_TIME if dts is None else dts, offset, len(data), 0),
        )
        self.hidden.append(packet.is_discard)
        self.facts.append(self._facts(data, packet.is_keyframe))

    def drop_last(self) -> None:
        """Drop the last packet; its bytes stay in a copy."""
        for column in (self.rows, self.facts, self.hidden):
            column.pop()

    def abandon(self) -> None:
        """Close the copy, which will not be handed to a caller."""
        if self.copy_fd is not None:
            os.close(self.copy_fd)
            self.copy_fd = None

    def _facts(self, data: bytes, key: bool) -> PacketFacts:
        if self._reader is None:
            return PacketFacts()
        try:
            return self._reader.read(data, key)
        except (EndOfBits, IndexError):  # damaged: decoding does not begin here in any case
            return PacketFacts()

    def _place(self, data: bytes, at: int | None) -> int:
        """Return the offset of the packet's bytes."""
        if self.copy_fd is None:
            at = self._find(data, at)
            if at is not None:
                return at
            self._copy_what_came_before()
        assert self.copy_fd is not None
        offset = self._copied
        _write(self.copy_fd, data)
        self._copied += len(data)
        return offset

    def _find(self, data: bytes, at: int | None) -> int | None:
        """Return the packet's offset in the file: the container's, or just behind a header, as in Matroska; None if not
        found.
        """
        if at is None:
            return None
        at = self._file.find(data[:_HEAD_BYTES], at, at + 2 * _HEAD_BYTES)
        return at if at >= 0 and self._file[at : at + len(data)] == data else None

    def _copy_what_came_before(self) -> None:
        self.copy_fd = os.memfd_create("omni-sched-packets", os.MFD_CLOEXEC)
        for i, (pts, dts, offset, nbytes, mark) in enumerate(self.rows):
            _write(self.copy_fd, self._file[offset : offset + nbytes])
            self.rows[i] = (pts, dts, self._copied, nbytes, mark)
            self._copied += nbytes


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _check_header(stream: VideoStream, container: InputContainer, limits: Limits | None) -> None:
    context = stream.codec_context
    if context is None or not context.is_decoder:
        raise VideoInputError("video: this installation cannot decode its codec; convert it to H.264")
    if not context.width or not context.height:
        raise VideoInputError("video: the size of its frames is unknown; the file is damaged")
    if limits is not None:
        limits.check_size(context.width, context.height)
        limits.check_frames(stream.frames)
        limits.check_duration(max((container.duration or 0) / av.time_base, _stream_seconds(stream)))


def _stream_seconds(stream: VideoStream) -> float:
    return float((stream.duration or 0) * (stream.time_base or 0))


def _rotation(container: InputContainer, stream: VideoStream) -> int:
    """Return the degrees clockwise of the stream's display matrix, which PyAV shows only in FFmpeg's description."""
    level = av.logging.get_level()
    av.logging.set_level(av.logging.INFO)  # the description is logged
    try:
        text: str = container.dumps_format()  # type: ignore[attr-defined] # missing in PyAV's hints
    except UnicodeDecodeError:  # raised for metadata
        text = ""
    finally:
        av.logging.set_level(level)
    return _rotation_in(text, stream.index)


def _rotation_in(description: str, index: int) -> int:
    """Return the degrees clockwise from the lines indented below the stream's own; lines of metadata do not match."""
    inside = False
    for line in description.split("\n"):
        if stream := _STREAM.match(line):
            inside = int(stream[1]) == index
        elif inside and (match := _ROTATION.fullmatch(line)) and match[1] != "nan":
            return round(-float(match[1])) % 360
    return 0


def _tag(context: VideoCodecContext) -> str:
    """Return the container's name of the codec; "" if it is not text."""
    try:
        return context.codec_tag
    except UnicodeDecodeError:
        return ""


def _rate(rate: Fraction | None) -> float:
    return float(rate) if rate else 0.0


def reason_of(error: Exception) -> str:
    """Return what FFmpeg says about an error, without the file that it names."""
    return getattr(error, "strerror", None) or str(error)
