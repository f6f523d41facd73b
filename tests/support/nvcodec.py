"""A module with the interface of PyNvVideoCodec 2.0.4 whose decoders are FFmpeg's, and videos for it.

What the real one is known to do, and this one does, too: it reads packets at an address, with start codes; frames come
in display order, NV12, known by the pts of their packets, the rest of them after an empty packet; it creates its
surfaces, and fails where it cannot, when it sees the first packet.
"""

from __future__ import annotations

import ctypes
import io
import itertools
from enum import Enum
from fractions import Fraction
from functools import lru_cache
from typing import Any

import av
import numpy as np
import torch

from benchmarks.harness.priority import kept_priority
from tests.support.host_device import HostDriver
from vllm_omni_sched.video.decoders.nvdec.decoder import NvdecDecoder
from vllm_omni_sched.video.decoders.nvdec.library import Library
from vllm_omni_sched.video.facts import PACKET, Order, PacketFlag, Piece, VideoIndex, WantedFrame

START, NONE = PacketFlag.START, PacketFlag(0)


class Unsupported(Exception):
    """Stands in for ``PyNvVCExceptionUnsupported``."""


class Failure(Exception):
    """Stands in for ``PyNvVCException``."""


class Codecs(Enum):
    H264 = "h264"
    HEVC = "hevc"
    VP9 = "vp9"
    AV1 = "libdav1d"


class PacketData:
    def __init__(self) -> None:
        self.bsl_data, self.bsl, self.pts = 0, 0, 0


class DecodedFrame:
    """Gone when its decoder is fed again, which the real one's memory is, too."""

    def __init__(self, frame: Any) -> None:
        self._pts = frame.pts
        nv12 = frame.reformat(format="nv12")
        planes = [np.frombuffer(p, np.uint8).reshape(-1, p.line_size)[:, : frame.width] for p in nv12.planes]
        self.tensor = torch.from_numpy(np.concatenate(planes))

    def getPTS(self) -> int:
        return self._pts

    def __dlpack__(self, **options: Any) -> Any:
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()


class Decoder:
    def __init__(self, module: NvCodec, codec: Codecs) -> None:
        self._module, self._codec = module, codec
        self._last: list[DecodedFrame] = []
        self._context = self._fresh()

    def Decode(self, packet: PacketData) -> list[DecodedFrame]:
        module = self._module
        for frame in self._last:
            frame.tensor.fill_(0xAA)
        if packet.bsl:
            module.fed += 1
            if module.fed == module.fails_at:
                raise module.failure
        if not packet.bsl:
            frames = self._context.decode(None)
            self._context = self._fresh()
        else:
            data = av.Packet(ctypes.string_at(packet.bsl_data, packet.bsl))
            data.pts = packet.pts
            frames = self._context.decode(data)
        self._last = [DecodedFrame(frame) for frame in frames]
        return self._last

    def _fresh(self) -> Any:
        context = av.CodecContext.create(self._codec.value, "r")
        context.thread_count = 1
        return context


class NvCodec:
    """Stands in for the module PyNvVideoCodec.

    Args:
        fails_at: the packet at which `failure` is raised, counting from 1.
        caps: in place of what a large card says.
    """

    cudaVideoCodec = Codecs
    cudaVideoChromaFormat = Enum("Chroma", {"420": 1})
    PacketData = PacketData
    PyNvVCException, PyNvVCExceptionUnsupported = Failure, Unsupported

    def __init__(self, fails_at: int = 0, failure: Exception | None = None, **caps: int) -> None:
        self.fails_at, self.failure = fails_at, failure or Failure("CUDA_ERROR_ILLEGAL_ADDRESS")
        self.caps = {
            "supported": 1,
            "num_decoder_engines": 7,
            "width_min": 48,
            "height_min": 16,
            "width_max": 8192,
            "height_max": 8192,
            "mb_num_max": 262144,
            **caps,
        }
        self.fed = self.created = 0

    def GetDecoderCaps(self, gpuid: int, codec: Codecs, chromaformat: Any, bitdepth: int) -> dict[str, int]:
        if gpuid > 1 and gpuid != 9:
            raise RuntimeError(f"Invalid gpu id {gpuid}")
        return {**self.caps, "bitdepth": bitdepth}

    def CreateDecoder(
        self, gpuid: int, codec: Codecs, cudacontext: int, cudastream: int, usedevicememory: bool
    ) -> Decoder:
        assert usedevicememory
        self.created += 1
        return Decoder(self, codec)


class HostDevice:
    """Stands in for `device.Device`: memory is the host's, and work is done when it is queued."""

    def use(self) -> None: ...

    def empty(self, slots: int, height: int, width: int) -> torch.Tensor:
        return torch.zeros((slots, height, width, 3), dtype=torch.uint8)

    def pinned(self, height: int, width: int) -> torch.Tensor:
        return torch.zeros((height, width, 3), dtype=torch.uint8)

    def scratch(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def finish(self) -> None: ...

    def recorded(self) -> Any:
        return self

    def synchronize(self) -> None: ...


def card(gpu: int) -> NvdecDecoder:
    """Make a decoder of a GPU in a decoder process."""
    return NvdecDecoder(gpu, library=Library(NvCodec()), device=HostDevice())


def sharing_card(gpu: int) -> NvdecDecoder:
    """Make a decoder of a GPU in a decoder process, which writes into memory of the host as if it were a device's.

    GPU 9 does not reach it.
    """
    driver = HostDriver()
    if gpu == 9:
        driver.fails["map"] = RuntimeError("peer access is not supported")
    return NvdecDecoder(gpu, library=Library(NvCodec()), device=HostDevice(), frames_driver=driver)


@lru_cache
def video(
    codec: str = "libx264", container: str = "mp4", frames: int = 48, pixels: str = "yuv420p", options: str = ""
) -> bytes:
    """Encode a moving gradient, 64x48, GOP 16; ``options`` as ``name=value`` separated by blanks."""
    file = io.BytesIO()
    with kept_priority(), av.open(file, "w", format=container) as out:
        stream = out.add_stream(codec, rate=Fraction(30))
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = 64, 48, pixels, 16
        stream.options = dict(option.split("=", 1) for option in options.split())
        y, x = np.mgrid[:48, :64]
        for i in range(frames):
            picture = np.stack([(x * 4 + i * 3) % 256, (y * 5 + i) % 256, (x + y + i * 7) % 256], -1).astype(np.uint8)
            out.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        out.mux(stream.encode())
    return file.getvalue()


def plain(data: bytes) -> dict[int, np.ndarray]:
    """Return every frame by its pts, decoded in sequence."""
    with av.open(io.BytesIO(data)) as file:
        return {frame.pts: _whole(frame).to_ndarray(format="rgb24") for frame in file.decode(video=0)}


def _whole(frame: av.VideoFrame) -> av.VideoFrame:
    """Return a frame without the flag `interlaced`, with which PyAV converts its two fields apart; we do not."""
    if not frame.interlaced_frame:
        return frame
    whole = av.VideoFrame.from_ndarray(frame.to_ndarray(), format=frame.format.name)
    whole.colorspace, whole.color_range = frame.colorspace, frame.color_range
    return whole


def indexed(data: bytes, **changes: Any) -> tuple[VideoIndex, memoryview]:
    """Return the index of an undamaged video, and its packets' bytes."""
    rows, body = [], b""
    with av.open(io.BytesIO(data)) as file:
        stream = file.streams.video[0]
        for packet in file.demux(stream):
            if packet.size:
                flag = START if packet.is_keyframe else NONE
                rows.append((packet.pts, packet.dts, len(body), packet.size, int(flag)))
                body += bytes(packet)
        context, base = stream.codec_context, stream.time_base
        facts = {
            "codec": context.codec.canonical_name,
            "decoder": context.name,
            "extradata": context.extradata or b"",
            "width": context.width,
            "height": context.height,
            "rotation": 0,
            "pixel_format": context.pix_fmt,
            "time_base": (base.numerator, base.denominator),
            "header_frames": len(rows),
            "fps": 30.0,
            "duration_seconds": len(rows) / 30,
            "packets": np.array(rows, PACKET),
            "in_file": False,
        }
    return VideoIndex(**{**facts, **changes}), memoryview(body)


def pieces(index: VideoIndex, wanted: list[int], order: Order = Order.PTS) -> list[Piece]:
    """Return a piece per key frame, up to the next one; closed GOPs only. Slots are in order of ``wanted``."""
    pts = index.packets["pts"]
    shown = np.sort(pts)
    starts = [*np.flatnonzero(index.packets["flags"] & START).tolist(), len(pts)]
    made = []
    for number, (begin, end) in enumerate(itertools.pairwise(starts)):
        here = set(pts[begin:end].tolist())
        mine = tuple(WantedFrame(n, int(shown[n]), slot) for slot, n in enumerate(wanted) if int(shown[n]) in here)
        made.append(Piece(number, np.arange(begin, end, dtype=np.int32), mine, order, 1.0))
    return made
