"""The Python side of the double of NVIDIA's video decoder: PyAV decodes what its parser gets, and tests set its limits.

NVIDIA's library in Python (PyNvVideoCodec) is the real one. Of the libraries of the driver below it,
``native/nvcuvid.c`` has the calls; this module decodes the packets.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from typing import Any

import av
import numpy as np
import numpy.typing as npt

from tests.cuda_double import kernels
from tests.cuda_double.build import CUVID, DRIVER, NVENC, folder
from vllm_omni_sched.video.decoders.nvdec.decoder import NvdecDecoder
from vllm_omni_sched.video.on_device import FramesReason
from vllm_omni_sched.video.options import VideoOptions
from vllm_omni_sched.video.pool.kinds import DecoderKind, cpu_kind
from vllm_omni_sched.video.sandbox.seccomp import Profile
from vllm_omni_sched.video.service import FlashCodec

CODECS = {4: "h264", 8: "hevc", 10: "vp9", 11: "libdav1d"}
"""cudaVideoCodec -> FFmpeg's decoder."""
H264, HEVC, VP9, AV1 = CODECS

_FLUSH, _FORGET = 1, 2
_MOST_PICTURES = 64


class _Picture(ctypes.Structure):
    _fields_ = (("pts", ctypes.c_longlong), ("nv12", ctypes.c_void_p), ("num_bytes", ctypes.c_uint))


class _Parsed(ctypes.Structure):
    _fields_ = (
        ("width", ctypes.c_int),
        ("height", ctypes.c_int),
        ("bit_depth", ctypes.c_int),
        ("matrix", ctypes.c_int),
        ("num_pictures", ctypes.c_int),
        ("pictures", _Picture * _MOST_PICTURES),
    )


class Limits(ctypes.Structure):
    """Answer of a device about a codec; ``engines`` 0: as many as the variable CUDA_DOUBLE_NVDEC_ENGINES says."""

    _fields_ = tuple(
        (name, ctypes.c_int)
        for name in ("supported", "engines", "min_width", "min_height", "max_width", "max_height", "macroblocks")
    )


class Counts(ctypes.Structure):
    """Counts of what the video decoder has done in this process: decoders that were made, and those that still are."""

    _fields_ = tuple((name, ctypes.c_long) for name in ("packets", "fails_at", "created", "open", "mapped"))


class _Stream:
    """Decodes the packets of one parser."""

    def __init__(self, codec: int) -> None:
        self._codec = codec
        self._context = self._new_context()
        self._kept: list[npt.NDArray[np.uint8]] = []  # what the pictures of the last call point to

    def parse(self, data: bytes, pts: int, ends: bool, parsed: Any) -> None:
        frames: list[av.VideoFrame] = []
        if data:
            packet = av.Packet(data)
            packet.pts = pts
            frames += self._context.decode(packet)
        context = self._context
        if ends:
            frames += context.decode(None)
            self._context = self._new_context()
        self._kept = [_nv12(frame) for frame in frames]
        parsed.width, parsed.height, parsed.bit_depth = context.width, context.height, 8
        parsed.matrix, parsed.num_pictures = int(context.colorspace), len(frames)
        for picture, frame, samples in zip(parsed.pictures, frames, self._kept, strict=False):
            picture.pts, picture.nv12, picture.num_bytes = frame.pts, samples.ctypes.data, samples.nbytes

    def _new_context(self) -> Any:
        context = av.CodecContext.create(CODECS[self._codec], "r")
        context.thread_count = 1
        return context


def _nv12(frame: av.VideoFrame) -> npt.NDArray[np.uint8]:
    """Return rows of luma, then of chroma, U and V in turn.

    Raises:
        ValueError: the samples are not those of 4:2:0 with 8 bits, of even size.
    """
    if frame.format.name not in ("yuv420p", "yuvj420p") or frame.width % 2 or frame.height % 2:
        raise ValueError(f"the CUDA double decodes no {frame.format.name} of {frame.width}x{frame.height}")
    luma, u, v = (
        np.frombuffer(plane, np.uint8).reshape(plane.height, plane.line_size)[:, : plane.width]
        for plane in frame.planes
    )
    chroma = np.stack([u, v], axis=-1).reshape(len(u), -1)
    return np.ascontiguousarray(np.concatenate([luma, chroma]))


_streams: dict[int, _Stream] = {}
_Parse = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_long,
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_longlong,
    ctypes.c_int,
    ctypes.POINTER(_Parsed),
)


@_Parse
def _parse(parser: int, codec: int, address: int | None, num_bytes: int, pts: int, verb: int, parsed: Any) -> int:
    if verb == _FORGET:
        _streams.pop(parser, None)
        return 0
    try:
        if parser not in _streams:
            _streams[parser] = _Stream(codec)
        data = ctypes.string_at(address, num_bytes) if num_bytes else b""
        _streams[parser].parse(data, pts, verb == _FLUSH, parsed.contents)
    except (av.FFmpegError, ValueError, KeyError):
        return 1
    return 0


@lru_cache
def library() -> Any:
    """Return the video decoder; load it, and all else that PyNvVideoCodec asks for by name."""
    ctypes.CDLL(str(folder() / DRIVER), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(folder() / NVENC))
    cuvid = ctypes.CDLL(str(folder() / CUVID))
    cuvid.cuda_double_set_parser(_parse)
    cuvid.cuda_double_fail_at.argtypes = [ctypes.c_long]
    return cuvid


def counts() -> Counts:
    found = Counts()
    library().cuda_double_video_counts(ctypes.byref(found))
    return found


def fail_at(packet: int) -> None:
    """Let the n-th packet from here on fail; 0: none."""
    library().cuda_double_fail_at(packet)


def get_limits(codec: int) -> Limits:
    found = Limits()
    library().cuda_double_get_limits(codec, ctypes.byref(found))
    return found


def set_limits(codec: int, changed: Limits) -> None:
    library().cuda_double_set_limits(codec, ctypes.byref(changed))


@contextmanager
def limits(codec: int, **changes: int) -> Iterator[None]:
    """Change what devices say of a codec."""
    before, changed = get_limits(codec), get_limits(codec)
    for name, value in changes.items():
        setattr(changed, name, value)
    set_limits(codec, changed)
    try:
        yield
    finally:
        set_limits(codec, before)


def set_up() -> None:
    """Let this process decode on the double. Idempotent."""
    kernels.install()
    library()


def small_frames() -> None:
    """Let the devices of this process decode frames of any size, which NVIDIA's do not for all codecs."""
    for codec in CODECS:
        changed = get_limits(codec)
        changed.min_width = changed.min_height = 16
        set_limits(codec, changed)


def card(gpu: int) -> NvdecDecoder:
    """Make a decoder of a GPU, in a decoder process."""
    import_module("torch._dynamo")  # operations of the double import it, which they cannot in the sandbox
    set_up()
    small_frames()
    return NvdecDecoder(gpu)


def service(device_bytes: int, place: FramesReason = FramesReason.ON_DEVICE) -> FlashCodec:
    """Return a service with an engine of each device, whose frames stay on the second one if they can."""
    set_up()
    options = VideoOptions.model_validate({"decoders": 1, "nvdec": "auto", "device_bytes": device_bytes})
    cards = DecoderKind("nvdec", "tests.cuda_double.video:card", Profile.DEVICE, (0, 1))
    return FlashCodec(options, kinds=(cards, cpu_kind(options)), place=place, device=1)
