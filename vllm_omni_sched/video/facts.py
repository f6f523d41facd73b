"""What is known of a video before a frame of it is decoded. Plain data, no codec in here."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntFlag
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt


class PacketFlag(IntFlag):
    """What a packet is to whoever wants to decode only some of them."""

    START = 1  # decoding may begin here: all frames from it on, in display order, come out exact
    HIDDEN = 2  # an edit list hides its frame: decoded, never shown
    DROPPABLE = 4  # no other frame needs it


PACKET = np.dtype([("pts", "<i8"), ("dts", "<i8"), ("offset", "<i8"), ("nbytes", "<i4"), ("flags", "<i4")])
"""One packet, in file order, which is decode order. ``offset`` counts from the start of the packets' bytes."""


NO_TIME = -(1 << 63)
"""A pts or dts that the container does not give."""


class Order(str, Enum):
    """How a frame's number is known."""

    PTS = "pts"  # the n-th pts in display order
    SEQUENCE = "sequence"  # only by decoding all that comes before


class SequenceReason(str, Enum):
    """Why a video, or part of it, is decoded in sequence."""

    NO_PTS = "no_pts"  # packets without a pts, two with the same, or pts that turn back
    DISORDER = "disorder"  # pts are not in the order in which the codec puts frames out
    NO_START = "no_start"  # no packet but the first where decoding may begin
    PACKETS_DIFFER = "packets_differ"  # parameters change within the stream, or packets hold several frames
    CODEC = "codec"  # a codec whose streams we do not know how to cut


@dataclass(frozen=True)
class Source:
    """What sampling rules see, as vLLM's ``VideoSourceMetadata``.

    ``total_frames`` is what the container says, as with OpenCV; damaged files have fewer.
    ``fps``: frames per second, 0.0 when unknown.
    """

    total_frames: int
    fps: float
    duration_seconds: float


@dataclass(frozen=True)
class VideoIndex:
    """A video, by its packets.

    Attributes:
        codec: FFmpeg's name of the decoder, such as ``h264``.
        extradata: the codec's parameters, out of the container.
        width, height: of decoded frames, before rotation, in pixels.
        rotation: degrees clockwise by which players turn frames: 0, 90, 180 or 270.
        pixel_format: FFmpeg's name.
        time_base: seconds of one unit of pts, as numerator and denominator.
        header_frames: frames by the container's header, 0 when it does not say.
        fps: FFmpeg's guess of the frame rate, 0.0 when it has none.
        duration_seconds: by the container, 0.0 when it does not say.
        packets: array of `PACKET`, shape (number of packets,).
        in_file: packets' bytes are the file's, at their offsets; else they were copied out of it.
        reorder: frames that the decoder may hold back to put them into display order, by the container, at least.
        order: how frames are numbered, and why so.
        mean_fps: frames by time, as the container tells or probing has found; 0.0 when unknown. This is what OpenCV
            takes for the frame rate.
        decoder: FFmpeg's name of the decoder, where it is not the codec's.
        codec_tag: the container's name of the codec, which some decoders go by.
        bits_per_sample: by the container, for the few decoders that need it.
        extradata_changes: packets with which the codec's parameters change, by their index, and to what.
        palettes: packets that bring a new palette, by their index, and what it is.
        container: FFmpeg's names of the container.
        stream_duration_seconds: of the video stream alone, 0.0 when it does not say.
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
    container: str = ""
    stream_duration_seconds: float = 0.0


class Wanted(NamedTuple):
    """A frame that somebody wants: its number in display order, its pts where it has one, its place in the output."""

    frame: int
    pts: int | None
    slot: int


@dataclass(frozen=True)
class Piece:
    """What one decoder decodes in one go: packets to feed, frames to keep.

    Attributes:
        number: of this piece within its video.
        feed: indices of packets, in decode order, dtype int32; whatever is not in it is not decoded.
        wanted: frames to convert and write, by display order. Of several with the same slot the first one that can be
            had is written.
        order: whether frames are known by pts, or counted from the first one that comes out.
        cost: predicted seconds of one decoder.
        threads: decoding threads that may work on it.
        attempt: 0, or how often it was planned anew, with more before it, after damage.
    """

    number: int
    feed: npt.NDArray[np.int32]
    wanted: tuple[Wanted, ...]
    order: Order
    cost: float
    threads: int = 1
    attempt: int = 0


@dataclass(frozen=True)
class PieceResult:
    """What came of a piece.

    Attributes:
        found: slots that were written.
        damaged: the decoder complained, or hid something: frames may not be what a plain decode gives.
        decoded: frames that came out of the decoder.
        decode_seconds, convert_seconds: where the time went.
        bytes_written: into the output.
        disordered: frames that are known by pts came out in another order than that of their pts, or without one:
            their numbers are not those by which they were looked for.
        frames: numbers of the frames in ``found``, where several could have been written to a slot.
    """

    found: tuple[int, ...]
    damaged: bool
    decoded: int
    decode_seconds: float
    convert_seconds: float
    bytes_written: int
    disordered: bool = False
    frames: tuple[int, ...] = ()
