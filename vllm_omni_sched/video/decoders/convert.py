"""Conversion of decoded frames to RGB, written in place, bit for bit as OpenCV 5 converts them.

OpenCV converts with libswscale (bicubic, by the frame's own matrix, range, primaries and transfer) to BGR, and swaps
the channels. PyAV can do the same, but only into new memory. Therefore common formats are converted by calling PyAV's
own libswscale directly, after a check that it gives the same result. Frames on which OpenCV fails, because they are
flagged as interlaced or in a colour space unknown to libswscale, are converted as if they were not.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import os
from typing import TYPE_CHECKING, Any, NamedTuple

import av
import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

_BICUBIC = 4
_RGB24 = 2  # AV_PIX_FMT_RGB24, which has kept its number since the first version of FFmpeg
_FULL_RANGE = 2  # AVCOL_RANGE_JPEG
_ONE = 1 << 16  # contrast and saturation, in fixed point
_ALIGNED_PIXELS = 16  # rows whose width is a multiple of it are converted uniformly up to their end
_PADDED_PIXELS = 64
_DIRECT = {"yuv420p", "yuvj420p", "yuv422p", "yuvj422p"}
_DIRECT_SPACES = {1, 2, 4, 5, 6, 7, 9}  # BT.709, unknown, FCC, BT.601, SMPTE 170M and 240M, BT.2020

_BT709 = 1
_UNKNOWN = 2
_KEPT_PRIMARIES = {1, 2, 4, 5, 6, 7}  # BT.709, unknown, BT.470 M and BG, SMPTE 170M and 240M
_KEPT_TRANSFERS = {1, 2, *range(4, 16), 17}  # all known ones except those of HDR, PQ and HLG
"""libswscale keeps these if no target is given; it converts all others to those of BT.709."""


class Converter:
    """Converts frames of one video, one after the other; used by one thread.

    Args:
        rotation: degrees clockwise by which frames are turned; angles other than multiples of 90 are ignored, as
            by OpenCV.
    """

    def __init__(self, rotation: int) -> None:
        self._turns = -rotation // 90 % 4 if rotation % 90 == 0 else 0  # numpy counts counterclockwise
        self._contexts: dict[_ContextKey, ctypes.c_void_p] = {}
        self._scratch: npt.NDArray[np.uint8] = np.empty((0, 0, 3), np.uint8)

    def convert(self, frame: av.VideoFrame, slot: npt.NDArray[np.uint8]) -> int:
        """Write a frame into its slot; one of another size is scaled to it.

        Args:
            frame: as decoded.
            slot: uint8 of shape (height, width, 3), after rotation.

        Returns:
            Bytes written, including intermediate copies.

        Raises:
            av.FFmpegError: libswscale cannot convert such frames.
        """
        height, width = slot.shape[:2] if self._turns % 2 == 0 else slot.shape[1::-1]
        if (
            (frame.width, frame.height) != (width, height)
            or _is_recoloured(frame)
            or not _is_direct(kind := _context_key(frame))
        ):
            image = _by_pyav(frame, width, height)
        elif self._turns == 0 and width % _ALIGNED_PIXELS == 0:
            _scale(self._context(kind), frame, slot)
            return slot.nbytes
        else:
            image = self._padded_image(width, height)
            _scale(self._context(kind), frame, image)
        np.copyto(slot, np.rot90(image, self._turns))
        return slot.nbytes + image.nbytes

    def close(self) -> None:
        """Free the contexts of libswscale; idempotent."""
        libraries = _libraries()
        for context in self._contexts.values():
            assert libraries is not None
            libraries.scale.sws_freeContext(context)
        self._contexts.clear()
        self._scratch = np.empty((0, 0, 3), np.uint8)

    def _context(self, kind: _ContextKey) -> ctypes.c_void_p:
        context = self._contexts.get(kind)
        if context is None:
            context = self._contexts[kind] = _new_context(kind)
        return context

    def _padded_image(self, width: int, height: int) -> npt.NDArray[np.uint8]:
        """Return an image whose rows are padded: libswscale converts the end of an unpadded row in another way."""
        if self._scratch.shape[:2] != (height, width):
            padded = -(-width // _PADDED_PIXELS) * _PADDED_PIXELS
            self._scratch = np.empty((height, padded, 3), np.uint8)[:, :width]
        return self._scratch


def _by_pyav(frame: av.VideoFrame, width: int, height: int) -> npt.NDArray[np.uint8]:
    try:
        bgr = _to_bgr(frame, width, height, _target_colours(frame) if _is_recoloured(frame) else {})
    except av.FFmpegError:  # a colour space that libswscale refuses
        frame.colorspace = _UNKNOWN
        bgr = _to_bgr(frame, width, height, {})
    return bgr[:, :, ::-1].view(np.uint8)


def _to_bgr(frame: av.VideoFrame, width: int, height: int, colours: dict[str, int]) -> npt.NDArray[Any]:
    return frame.reformat(width, height, "bgr24", interpolation="BICUBIC", threads=1, **colours).to_ndarray()


def _is_recoloured(frame: av.VideoFrame) -> bool:
    """Return whether OpenCV's conversion changes primaries or transfer, as with BT.2020, PQ and HLG."""
    return frame.color_primaries not in _KEPT_PRIMARIES or frame.color_trc not in _KEPT_TRANSFERS


def _target_colours(frame: av.VideoFrame) -> dict[str, int]:
    """Return the target's colours that libswscale assumes by default; PyAV changes none unless told."""
    primaries = frame.color_primaries if frame.color_primaries in _KEPT_PRIMARIES else _BT709
    transfer = frame.color_trc if frame.color_trc in _KEPT_TRANSFERS else _BT709
    return {"dst_color_primaries": int(primaries), "dst_color_trc": int(transfer)}


class _ContextKey(NamedTuple):
    """The parameters of a context of libswscale."""

    width: int
    height: int
    pixel_format: str
    space: int
    full_range: bool


class _Libraries(NamedTuple):
    scale: ctypes.CDLL
    util: ctypes.CDLL


def _context_key(frame: av.VideoFrame) -> _ContextKey:
    name = frame.format.name
    full = frame.color_range == _FULL_RANGE or name.startswith("yuvj")
    return _ContextKey(frame.width, frame.height, name, int(frame.colorspace), full)


def _is_direct(kind: _ContextKey) -> bool:
    """Return whether libswscale may be called directly: pairs of rows, one after the other, with nothing between."""
    return (
        kind.pixel_format in _DIRECT
        and kind.height % 2 == 0
        and kind.space in _DIRECT_SPACES
        and _equals_pyav(kind.pixel_format, kind.space, kind.full_range)
    )


@functools.cache
def _equals_pyav(pixel_format: str, space: int, full_range: bool) -> bool:
    """Return whether libswscale, called directly, converts such frames as PyAV does."""
    if _libraries() is None:
        return False
    kind = _ContextKey(64, 64, pixel_format, space, full_range)
    rows = np.arange(64 * 128, dtype=np.uint32) * 7919 >> 5
    planes = rows.astype(np.uint8).reshape(128, 64)[: 128 if "422" in pixel_format else 96]
    frame = av.VideoFrame(64, 64, pixel_format)
    at = 0
    for plane in frame.planes:
        nbytes = plane.width * plane.height
        padded = np.zeros((plane.height, plane.line_size), np.uint8)
        padded[:, : plane.width] = planes.reshape(-1)[at : at + nbytes].reshape(plane.height, plane.width)
        plane.update(padded.tobytes())
        at += nbytes
    frame.colorspace = space
    frame.color_range = _FULL_RANGE if full_range else 1
    out = np.zeros((64, 64, 3), np.uint8)
    context = _new_context(kind)
    _scale(context, frame, out)
    _libraries().scale.sws_freeContext(context)  # type: ignore[union-attr]
    return np.array_equal(out, _by_pyav(frame, 64, 64))


def _new_context(kind: _ContextKey) -> ctypes.c_void_p:
    libraries = _libraries()
    assert libraries is not None
    number = libraries.util.av_get_pix_fmt(kind.pixel_format.encode())
    size = kind.width, kind.height
    address = libraries.scale.sws_getContext(*size, number, *size, _RGB24, _BICUBIC, None, None, None)
    if not address:
        raise MemoryError("libswscale cannot allocate the context that converts a frame")
    context = ctypes.c_void_p(address)
    source, target = libraries.scale.sws_getCoefficients(kind.space), libraries.scale.sws_getCoefficients(5)
    libraries.scale.sws_setColorspaceDetails(context, source, kind.full_range, target, 1, 0, _ONE, _ONE)
    return context


def _scale(context: ctypes.c_void_p, frame: av.VideoFrame, out: npt.NDArray[np.uint8]) -> None:
    libraries = _libraries()
    assert libraries is not None
    planes = frame.planes
    source = (ctypes.c_void_p * 4)(*[plane.buffer_ptr for plane in planes])
    strides = (ctypes.c_int * 4)(*[plane.line_size for plane in planes])
    target, stride = (ctypes.c_void_p * 4)(out.ctypes.data), (ctypes.c_int * 4)(out.strides[0])
    libraries.scale.sws_scale(context, source, strides, 0, frame.height, target, stride)


@functools.cache
def _libraries() -> _Libraries | None:
    """Return the libraries that PyAV itself has loaded; None if they are not beside it, as in its wheels."""
    home = os.path.dirname(os.path.dirname(os.path.abspath(av.__file__)))
    paths = [glob.glob(os.path.join(glob.escape(home), "av.libs", f"lib{name}*.so*")) for name in ("swscale", "avutil")]
    if any(len(found) != 1 for found in paths):
        return None
    try:
        scale, util = (ctypes.CDLL(found[0]) for found in paths)
        number, pointer = ctypes.c_int, ctypes.c_void_p
        pointers, numbers = ctypes.POINTER(pointer), ctypes.POINTER(number)
        scale.sws_getContext.restype = pointer
        scale.sws_getContext.argtypes = (number,) * 7 + (pointer,) * 3
        scale.sws_scale.argtypes = [pointer, pointers, numbers, number, number, pointers, numbers]
        scale.sws_getCoefficients.restype = pointer
        scale.sws_setColorspaceDetails.argtypes = (pointer, pointer, number, pointer, *(number,) * 4)
        scale.sws_freeContext.argtypes = [pointer]
        scale.sws_freeContext.restype = None
        util.av_get_pix_fmt.argtypes = [ctypes.c_char_p]
    except (OSError, AttributeError):
        return None
    return _Libraries(scale, util)
