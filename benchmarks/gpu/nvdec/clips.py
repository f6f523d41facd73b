"""Videos to decode: made here where PyAV is, or a small one that lies beside this file."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.nvdec import CODECS
from benchmarks.harness.priority import kept_priority
from vllm_omni_sched.video.facts import PACKET, VideoIndex

EMBEDDED = Path(__file__).with_name("clip.json")
_FIELDS = (
    "codec",
    "codec_tag",
    "width",
    "height",
    "rotation",
    "pixel_format",
    "header_frames",
    "fps",
    "duration_seconds",
    "reorder",
)


@dataclass(frozen=True)
class Clip:
    """A video in packets.

    Attributes:
        digests: of its frames as swscale makes them RGB, in display order; empty where a CPU decoder is at hand.
    """

    name: str
    index: VideoIndex
    packets: bytes
    digests: list[str] = field(default_factory=list)


def digest(frame: Any) -> str:
    """Return the digest of a frame, uint8 of shape (height, width, 3)."""
    return hashlib.sha256(np.ascontiguousarray(frame)).hexdigest()[:16]


def embedded() -> Clip:
    """Read the embedded clip: H.264, 176x144, 24 frames in two GOPs."""
    told = json.loads(EMBEDDED.read_text())
    index = VideoIndex(
        **{name: told[name] for name in _FIELDS},
        extradata=base64.b64decode(told["extradata"]),
        time_base=tuple(told["time_base"]),
        packets=np.array([tuple(row) for row in told["packets"]], PACKET),
        in_file=False,
    )
    return Clip("embedded h264 176x144", index, base64.b64decode(told["data"]), told["digests"])


def made(codec: str, seconds: int, width: int = 1280, height: int = 720, rate: int = 30, gop: int = 60) -> Clip:
    """Return a clip of `encoded`, in packets.

    Raises:
        ImportError: PyAV is missing.
        ValueError: this PyAV has no encoder for the codec.
    """
    index, packets = read(encoded(codec, seconds, width, height, rate, gop))
    return Clip(f"{codec} {width}x{height}, {seconds} s, GOP {gop}", index, packets)


def encoded(codec: str, seconds: int, width: int = 1280, height: int = 720, rate: int = 30, gop: int = 60) -> bytes:
    """Encode a wandering texture behind a disc, about as hard to decode as a hand-held camera's video; return a file.

    Raises:
        ImportError: PyAV is missing.
        ValueError: this PyAV has no encoder for the codec.
    """
    import io

    import av

    encoder, options = CODECS[codec]
    file = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (height // 4 + 60, width // 4 + 120, 3), dtype=np.uint8)
    texture = np.kron(noise, np.ones((4, 4, 1), np.uint8))
    y, x = np.mgrid[:height, :width]
    with kept_priority(), av.open(file, "w", format="mp4") as out:
        stream = out.add_stream(encoder, rate=Fraction(rate))
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = width, height, "yuv420p", gop
        stream.options = {"g": str(gop), **dict(option.split("=", 1) for option in options.split())}
        for i in range(seconds * rate):
            left, top = int(200 + 190 * np.sin(i / 50)), int(100 + 95 * np.cos(i / 37))
            frame = texture[top : top + height, left : left + width].copy()
            centre = width / 2 + width / 3 * np.sin(i / 20), height / 2 + height / 3 * np.cos(i / 13)
            frame[(x - centre[0]) ** 2 + (y - centre[1]) ** 2 < (height / 8) ** 2] = (255, 50, i % 256)
            out.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        out.mux(stream.encode())
    return file.getvalue()


def read(data: bytes) -> tuple[VideoIndex, bytes]:
    """Index and packets' bytes of a file."""
    from vllm_omni_sched.video.demux import read_index

    fd = os.memfd_create("clip")
    try:
        os.write(fd, data)
        index, packets_fd = read_index(fd)
    finally:
        os.close(fd)
    if packets_fd is None:
        return index, data
    with open(packets_fd, "rb") as packets:
        packets.seek(0)
        return index, packets.read()


def write_embedded(frames: int = 24, gop: int = 12) -> None:
    """Make the clip that lies here anew; from the repository:
    ``python -c "from benchmarks.gpu.nvdec import clips; clips.write_embedded()"``.

    Needs PyAV; its frames are told by the digests of what FFmpeg decodes.
    """
    import io

    import av

    file = io.BytesIO()
    y, x = np.mgrid[:144, :176]
    with av.open(file, "w", format="mp4") as out:
        stream = out.add_stream("libx264", rate=Fraction(30))
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = 176, 144, "yuv420p", gop
        stream.options = {"bf": "2", "sc_threshold": "0", "crf": "30", "g": str(gop)}
        for i in range(frames):
            picture = np.stack([(x + 5 * i) % 256, (y * 2 + 3 * i) % 256, (x + y) % 256], -1).astype(np.uint8)
            picture[(x - 20 - 5 * i) ** 2 + (y - 72) ** 2 < 400] = (250, 240, 40)
            out.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        out.mux(stream.encode())
    index, packets = read(file.getvalue())
    rows = [row.item() for row in index.packets]
    body = b"".join(packets[offset : offset + nbytes] for _, _, offset, nbytes, _ in rows)
    starts = np.cumsum([0, *(row[3] for row in rows)]).tolist()
    with av.open(io.BytesIO(file.getvalue())) as again:
        digests = [digest(frame.to_ndarray(format="rgb24")) for frame in again.decode(video=0)]
    told = {
        **{name: getattr(index, name) for name in _FIELDS},
        "extradata": base64.b64encode(index.extradata).decode(),
        "time_base": index.time_base,
        "packets": [(pts, dts, start, n, mark) for (pts, dts, _, n, mark), start in zip(rows, starts, strict=False)],
        "data": base64.b64encode(body).decode(),
        "digests": digests,
    }
    EMBEDDED.write_text(json.dumps(told) + "\n")
