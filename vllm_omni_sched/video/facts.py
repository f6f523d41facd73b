"""Facts on a video that are known before its frames are decoded. Plain data, without a codec."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntFlag
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt


class PacketFlag(IntFlag):
    """Properties of a packet that decide whether it can be skipped."""

    START = 1  # decoding may begin here: all frames from it on, in display order, are exact
    HIDDEN = 2  # an edit list hides its frame: it is decoded, but never shown
    DROPPABLE = 4  # no other frame needs it


PACKET = np.dtype([("pts", "<i8"), ("dts", "<i8"), ("offset", "<i8"), ("nbytes", "<i4"), ("flags", "<i4")])
"""One packet, in file order, which is decode order. ``offset`` counts from the start of the packets' bytes."""


NO_TIME = -(1 << 63)
"""Stands for a pts or dts that the container does not give."""


class Order(str, Enum):
    """The way in which a frame's number is known."""

    PTS = "pts"  # the n-th pts in display order
    SEQUENCE = "sequence"  # only by decoding all frames before it


class SequenceReason(str, Enum):
    """Reason why a video, or part of it, is decoded in sequence."""

    NO_PTS = "no_pts"  # packets without a pts, two with the same pts, or pts that decrease at a start
    DISORDER = "disorder"  # pts are not in the order in which the codec outputs frames
    NO_START = "no_start"  # decoding may begin at no packet, or only at the first one
    PACKETS_DIFFER = "packets_differ"  # parameters change within the stream, or packets hold several frames
    CODEC = "codec"  # a codec whose streams cannot be cut here


@dataclass(frozen=True)
class VideoIndex:
    """The index of a video: its packets and parameters.

    Attributes:
        codec: FFmpeg's name of the decoder, such as ``h264``.
        extradata: the codec's parameters, from the container.
        width, height: size of decoded frames before rotation, in pixels.
        rotation: degrees clockwise by which players turn frames: 0, 90, 180 or 270.
        pixel_format: FFmpeg's name of the pixel format.
        time_base: seconds of one unit of pts, as numerator and denominator.
        header_frames: number of frames in the container's header, 0 if unknown.
        fps: FFmpeg's guess of the frame rate, 0.0 if it has none.
        duration_seconds: duration of the container, 0.0 if unknown.
        packets: array of `PACKET`, shape (number of packets,).
        in_file: whether the packets' bytes are in the file, at their offsets; else they were copied out of it.
        reorder: frames that the decoder holds back to reorder them, at least, according to the container.
        order: how frames are numbered.
        why_sequence: why frames are numbered in sequence, or can be decoded only from the first packet on.
        notes: irregularities found while indexing, as text.
        mean_fps: mean frame rate, from the container or from probing; 0.0 if unknown. OpenCV uses it as the frame
            rate.
        decoder: FFmpeg's name of the decoder, if it differs from the codec's.
        codec_tag: the container's name of the codec, which some decoders use.
        bits_per_sample: bits per sample in the container, for the few decoders that need it.
        extradata_changes: index of each packet at which the codec's parameters change, and the new parameters.
        palettes: index of each packet with a new palette, and the palette.
        stream_duration_seconds: duration of the video stream alone, 0.0 if unknown.
        frames: number of shown frames, where it is not that of the packets that no edit list hides; else 0.
    """

    codec: str
    extradata: bytes
    width: int
    height: int
    rotation: int
    pixel_format: str
    time_base: tuple[int, int]
    header_frames: int
    fps: float
    duration_seconds: float
    packets: npt.NDArray[np.void]
    in_file: bool
    reorder: int = 0
    order: Order = Order.PTS
    why_sequence: SequenceReason | None = None
    notes: tuple[str, ...] = field(default=())
    mean_fps: float = 0.0
    decoder: str = ""
    codec_tag: str = ""
    bits_per_sample: int = 0
    extradata_changes: tuple[tuple[int, bytes], ...] = ()
    palettes: tuple[tuple[int, bytes], ...] = ()
    stream_duration_seconds: float = 0.0
    frames: int = 0


class WantedFrame(NamedTuple):
    """A wanted frame: its number in display order, its pts if it has one, and its slot in the output."""

    frame: int
    pts: int | None
    slot: int


class DeviceRange(NamedTuple):
    """A range of the memory of all frames on a device, in bytes."""

    start: int
    nbytes: int


@dataclass(frozen=True)
class Piece:
    """The part of a video that one decoder decodes in one go: packets to feed, frames to keep.

    Attributes:
        number: number of this piece within its video.
        feed: indices of packets, in decode order, dtype int32; other packets are not decoded.
        wanted: frames to convert and write, by display order. Of several with the same slot, the first one that can
            be decoded is written.
        order: whether frames are known by pts, or counted from the first one decoded.
        cost: predicted seconds of one decoder.
        threads: decoding threads that may work on it.
        attempt: 0, or how often it was planned again, with more packets before it, after damage.
    """

    number: int
    feed: npt.NDArray[np.int32]
    wanted: tuple[WantedFrame, ...]
    order: Order
    cost: float
    threads: int = 1
    attempt: int = 0


@dataclass(frozen=True)
class PieceResult:
    """The result of decoding a piece.

    Attributes:
        found: slots that were written.
        damaged: whether the decoder reported errors, or hid some: frames may differ from those of a plain decode.
        decoded: number of frames that the decoder produced.
        decode_seconds, convert_seconds: time of decoding and of conversion.
        bytes_written: bytes written into the output.
        disordered: whether frames known by pts came in another order than that of their pts, or without a pts, so
            that their numbers are not those by which they were looked up.
        frames: numbers of the frames in ``found``, as several could have been written to a slot.
    """

    found: tuple[int, ...]
    damaged: bool
    decoded: int
    decode_seconds: float
    convert_seconds: float
    bytes_written: int
    disordered: bool = False
    frames: tuple[int, ...] = ()
