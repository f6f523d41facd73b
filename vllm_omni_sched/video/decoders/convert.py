"""Conversion of decoded frames to RGB, written in place, bit for bit as OpenCV 5 converts them.

OpenCV converts with libswscale (bicubic, by the frame's own matrix, range, primaries and transfer) to BGR, and swaps
the channels. PyAV can do the same, but only into new memory. Therefore common formats are converted by calling PyAV's
own libswscale directly, after a check that it gives the same result. Frames on which OpenCV fails, because they are
flagged as interlaced or in a colour space unknown to libswscale, are converted as if they were not.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import glob
import os
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import av
import numpy as np
from av.video.reformatter import VideoReformatter

if TYPE_CHECKING:
    import numpy.typing as npt

_FLAGS = 4  # SWS_BICUBIC
_RGB24 = 2  # AV_PIX_FMT_RGB24, which has kept its number since the first version of FFmpeg
_FULL_RANGE = 2  # AVCOL_RANGE_JPEG
_ONE = 1 << 16  # contrast and saturation, in fixed point
_ALIGNED_PIXELS = 16  # rows whose width is a multiple of it are converted uniformly up to their end
_PADDED_PIXELS = 64
_KEPT_CONTEXTS = 4  # one whose frames are changed in primaries or transfer has 16 bytes per pixel
_KEPT_PIXELS = 1 << 21  # above 1080p, contexts are not kept for the next video
_DIRECT = {"yuv420p", "yuvj420p", "yuv422p", "yuvj422p"}
_DIRECT_SPACES = {1, 2, 4, 5, 6, 7, 9}  # BT.709, unknown, FCC, BT.601, SMPTE 170M and 240M, BT.2020

_BT709 = 1
_UNKNOWN = 2
_KEPT_PRIMARIES = {1, 2, 4, 5, 6, 7}  # BT.709, unknown, BT.470 M and BG, SMPTE 170M and 240M
_KEPT_TRANSFERS = {1, 2, *range(4, 16), 17}  # all known ones except those of HDR, PQ and HLG
"""libswscale keeps these if no target is given; it converts all others to those of BT.709."""


class Converter:
    """Converts frames, one after the other; used by one thread.

    libswscale's contexts of the last few kinds of frames are kept, also for the next videos: where primaries or
    transfer change, each takes seconds to compute a table of all colours.
    """

    def __init__(self) -> None:
        self._direct = functools.lru_cache(_KEPT_CONTEXTS)(_DirectContext)
        self._by_pyav = functools.lru_cache(_KEPT_CONTEXTS)(_PyAvContext)
        self._most_pixels = 0  # of an image made by PyAV for this video
        self._scratch: npt.NDArray[np.uint8] = np.empty((0, 0, 3), np.uint8)

    def convert(self, frame: av.VideoFrame, slot: npt.NDArray[np.uint8], rotation: int = 0) -> int:
        """Write a frame into its slot; one of another size is scaled to it.

        Args:
            frame: as decoded.
            slot: uint8 of shape (height, width, 3), after rotation.
            rotation: degrees clockwise by which the frame is turned; angles other than multiples of 90 are ignored, as
                by OpenCV.

        Returns:
            Bytes written, including intermediate copies.

        Raises:
            av.FFmpegError: libswscale cannot convert such frames.
        """
        turns = -rotation // 90 % 4 if rotation % 90 == 0 else 0  # numpy counts counterclockwise
        height, width = slot.shape[:2] if turns % 2 == 0 else slot.shape[1::-1]
        if (
            (frame.width, frame.height) != (width, height)
            or is_recoloured(frame)
            or not _is_direct(kind := _frame_kind(frame))
        ):
            colours = int(frame.color_primaries), int(frame.color_trc)
            self._most_pixels = max(self._most_pixels, frame.width * frame.height, width * height)
            context = self._by_pyav(_frame_kind(frame), colours, frame.interlaced_frame, (width, height))
            image = context.convert(frame)
        elif turns == 0 and width % _ALIGNED_PIXELS == 0:
            self._direct(kind).convert(frame, slot)
            return slot.nbytes
        else:
            image = self._padded_image(width, height)
            self._direct(kind).convert(frame, image)
        np.copyto(slot, np.rot90(image, turns))
        return slot.nbytes + image.nbytes

    def end_video(self) -> None:
        """Free what takes much memory: images, and contexts if one of them is for large frames."""
        self._scratch = np.empty((0, 0, 3), np.uint8)
        if self._most_pixels > _KEPT_PIXELS:
            self._by_pyav.cache_clear()
        self._most_pixels = 0

    def _padded_image(self, width: int, height: int) -> npt.NDArray[np.uint8]:
        """Return an image whose rows are padded: libswscale converts the end of an unpadded row in another way."""
        if self._scratch.shape[:2] != (height, width):
            padded = -(-width // _PADDED_PIXELS) * _PADDED_PIXELS
            self._scratch = np.empty((height, padded, 3), np.uint8)[:, :width]
        return self._scratch


class _PyAvContext:
    """Converts frames of one kind by PyAV into new memory.

    Args:
        kind, colours, interlaced: of the frames, with their primaries and transfer; they tell contexts apart.
        size: width and height of the images.
    """

    def __init__(self, kind: _FrameKind, colours: tuple[int, int], interlaced: bool, size: tuple[int, int]) -> None:
        del kind, interlaced
        self._size = size
        primaries, transfer = (
            own if own in kept else _BT709
            for own, kept in zip(colours, (_KEPT_PRIMARIES, _KEPT_TRANSFERS), strict=True)
        )
        # The target's colours that libswscale assumes by default; PyAV changes none unless told.
        recoloured = (primaries, transfer) != colours
        self._colours = {"dst_color_primaries": primaries, "dst_color_trc": transfer} if recoloured else {}
        self._reformatter, self._swapper = VideoReformatter(), VideoReformatter()
        self._refused = False

    def convert(self, frame: av.VideoFrame) -> npt.NDArray[np.uint8]:
        """Return the frame as RGB; one in a colour space that libswscale refuses as if the space were unknown."""
        if not self._refused:
            try:
                return self._rgb(frame, self._colours)
            except av.FFmpegError as error:
                if error.errno == errno.ENOMEM:
                    raise
                self._refused = True
        frame.colorspace = _UNKNOWN
        return self._rgb(frame, {})

    def _rgb(self, frame: av.VideoFrame, colours: dict[str, int]) -> npt.NDArray[Any]:
        bgr = self._reformatter.reformat(frame, *self._size, "bgr24", interpolation=_FLAGS, threads=1, **colours)
        return self._swapper.reformat(bgr, format="rgb24", interpolation=_FLAGS, threads=1).to_ndarray()


def is_recoloured(frame: av.VideoFrame) -> bool:
    """Return whether OpenCV's conversion changes primaries or transfer, as with BT.2020, PQ and HLG."""
    return frame.color_primaries not in _KEPT_PRIMARIES or frame.color_trc not in _KEPT_TRANSFERS


class _FrameKind(NamedTuple):
    """The properties of a frame that a context of libswscale depends on, except primaries and transfer."""

    width: int
    height: int
    pixel_format: str
    space: int
    full_range: bool


class _Libraries(NamedTuple):
    scale: ctypes.CDLL
    util: ctypes.CDLL


def _frame_kind(frame: av.VideoFrame) -> _FrameKind:
    name = frame.format.name
    full = frame.color_range == _FULL_RANGE or name.startswith("yuvj")
    return _FrameKind(frame.width, frame.height, name, int(frame.colorspace), full)


def _is_direct(kind: _FrameKind) -> bool:
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
    kind = _FrameKind(64, 64, pixel_format, space, full_range)
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
    _DirectContext(kind).convert(frame, out)
    return np.array_equal(out, _PyAvContext(kind, (_UNKNOWN, _UNKNOWN), False, (64, 64)).convert(frame))


class _DirectContext:
    """Converts frames of one kind by libswscale, in place."""

    def __init__(self, kind: _FrameKind) -> None:
        libraries = _libraries()
        assert libraries is not None
        self._scale = libraries.scale
        number = libraries.util.av_get_pix_fmt(kind.pixel_format.encode())
        size = kind.width, kind.height
        address = self._scale.sws_getContext(*size, number, *size, _RGB24, _FLAGS, None, None, None)
        if not address:
            raise MemoryError("libswscale cannot allocate the context that converts a frame")
        self._context = ctypes.c_void_p(address)
        weakref.finalize(self, self._scale.sws_freeContext, self._context)
        source, target = self._scale.sws_getCoefficients(kind.space), self._scale.sws_getCoefficients(5)
        self._scale.sws_setColorspaceDetails(self._context, source, kind.full_range, target, 1, 0, _ONE, _ONE)

    def convert(self, frame: av.VideoFrame, out: npt.NDArray[np.uint8]) -> None:
        """Write a frame as RGB."""
        planes = frame.planes
        source = (ctypes.c_void_p * 4)(*[plane.buffer_ptr for plane in planes])
        strides = (ctypes.c_int * 4)(*[plane.line_size for plane in planes])
        target, stride = (ctypes.c_void_p * 4)(out.ctypes.data), (ctypes.c_int * 4)(out.strides[0])
        self._scale.sws_scale(self._context, source, strides, 0, frame.height, target, stride)


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
