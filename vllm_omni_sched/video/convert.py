"""From decoded frames to RGB, written where they are to be, as OpenCV's video reader converts them."""

from __future__ import annotations

import ctypes
import functools
import glob
import os
from typing import TYPE_CHECKING, NamedTuple

import av
import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

_BICUBIC = 4
_RGB24 = 2  # AV_PIX_FMT_RGB24, which has kept its number since the first version of FFmpeg
_ALIGNED_PIXELS = 64
_ROW_BY_ROW = {"yuv420p", "yuvj420p"}  # formats converted two rows at a time, from nothing but these rows


class Converter:
    """Converts frames of one video, one after the other. Used by one thread.

    Args:
        rotation: degrees clockwise by which frames are turned.
    """

    def __init__(self, rotation: int) -> None:
        self._turns = -rotation // 90 % 4 if rotation % 90 == 0 else 0  # numpy counts the other way round
        libraries = _checked()
        self._scaler = _Scaler(libraries) if libraries is not None else None
        self._scratch: npt.NDArray[np.uint8] = np.empty((0, 0, 3), np.uint8)

    def convert(self, frame: av.VideoFrame, coded_size: tuple[int, int], slot: npt.NDArray[np.uint8]) -> int:
        """Write a frame into its slot.

        Args:
            frame: as decoded.
            coded_size: width and height that the decoder works with: OpenCV converts all of it, and cuts afterwards.
            slot: uint8 of shape (height, width, 3), after rotation.

        Returns:
            Bytes written, those of copies on the way among them.
        """
        height, width = slot.shape[:2] if self._turns % 2 == 0 else slot.shape[1::-1]
        if (frame.width, frame.height) != (width, height):  # it changes within the stream
            image = frame.to_ndarray(format="rgb24", width=width, height=height, interpolation="BICUBIC")
            np.copyto(slot, np.rot90(image, self._turns))
            return slot.nbytes + image.nbytes
        whole = _whole_size(frame, coded_size)
        if self._turns == 0 and whole == (width, height) and width % _ALIGNED_PIXELS == 0:
            self._into(frame, whole, slot)
            return slot.nbytes
        image = self._scratch_of(*whole)
        self._into(frame, whole, image)
        np.copyto(slot, np.rot90(image[:height, :width], self._turns))
        return slot.nbytes + image.nbytes

    def _scratch_of(self, width: int, height: int) -> npt.NDArray[np.uint8]:
        """An image whose rows have room behind them; the end of one that has none is converted in another way."""
        if self._scratch.shape[:2] != (height, width):
            padded = -(-width // _ALIGNED_PIXELS) * _ALIGNED_PIXELS
            self._scratch = np.empty((height, padded, 3), np.uint8)[:, :width]
        return self._scratch

    def _into(self, frame: av.VideoFrame, size: tuple[int, int], out: npt.NDArray[np.uint8]) -> None:
        if self._scaler is not None and self._scaler.convert(frame, size, out):
            return
        image = frame.to_ndarray(format="rgb24", interpolation="BICUBIC")
        out[: image.shape[0], : image.shape[1]] = image

    def close(self) -> None:
        """Give back what conversion needed; may be called twice."""
        if self._scaler is not None:
            self._scaler.close()
            self._scaler = None
        self._scratch = np.empty((0, 0, 3), np.uint8)


def _whole_size(frame: av.VideoFrame, coded: tuple[int, int]) -> tuple[int, int]:
    """Width and height to convert. A coded size that is far larger hints at cropping from the left or the top."""
    extra = coded[0] - frame.width, coded[1] - frame.height
    if min(extra) < 0 or max(extra) > 15:
        return frame.width, frame.height
    if extra[0] == 0 and frame.height % 2 == 0 and frame.format.name in _ROW_BY_ROW:
        return frame.width, frame.height  # rows below change nothing
    return coded


class _Libraries(NamedTuple):
    scale: ctypes.CDLL
    util: ctypes.CDLL


class _Scaler:
    """libswscale, as it came with PyAV: PyAV's own conversion can only write into new memory."""

    def __init__(self, libraries: _Libraries) -> None:
        self._libraries = libraries
        self._contexts: dict[tuple[int, int, str], int | None] = {}

    def convert(self, frame: av.VideoFrame, size: tuple[int, int], out: npt.NDArray[np.uint8]) -> bool:
        """Convert; False when the library cannot."""
        context = self._context(*size, frame.format.name)
        if not context:
            return False
        planes = frame.planes
        source = (ctypes.c_void_p * 4)(*[plane.buffer_ptr for plane in planes])
        strides = (ctypes.c_int * 4)(*[plane.line_size for plane in planes])
        target = (ctypes.c_void_p * 4)(out.ctypes.data)
        stride = (ctypes.c_int * 4)(out.strides[0])
        lines: int = self._libraries.scale.sws_scale(context, source, strides, 0, size[1], target, stride)
        return lines == size[1]

    def _context(self, width: int, height: int, pixel_format: str) -> int | None:
        key = (width, height, pixel_format)
        if key not in self._contexts:
            number = self._libraries.util.av_get_pix_fmt(pixel_format.encode())
            self._contexts[key] = number >= 0 and self._libraries.scale.sws_getContext(
                width, height, number, width, height, _RGB24, _BICUBIC, None, None, None
            )
        return self._contexts[key]

    def close(self) -> None:
        for context in self._contexts.values():
            if context:
                self._libraries.scale.sws_freeContext(context)
        self._contexts.clear()


def _load() -> _Libraries | None:
    """The very libraries that PyAV has loaded; other packages bring their own, of other versions."""
    home = os.path.dirname(os.path.dirname(os.path.abspath(av.__file__)))
    paths = []
    for name in ("swscale", "avutil"):
        bundled = glob.glob(os.path.join(glob.escape(home), "av.libs", f"lib{name}*.so*"))
        if len(bundled) != 1:
            return None
        paths += bundled
    try:
        libraries = _Libraries(*map(ctypes.CDLL, paths))
        libraries.scale.sws_getContext.restype = ctypes.c_void_p
        libraries.scale.sws_getContext.argtypes = [ctypes.c_int] * 7 + [ctypes.c_void_p] * 3
        pointers, numbers = ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_int)
        libraries.scale.sws_scale.argtypes = [
            ctypes.c_void_p, pointers, numbers, ctypes.c_int, ctypes.c_int, pointers, numbers
        ]  # fmt: skip
        libraries.scale.sws_freeContext.argtypes = [ctypes.c_void_p]
        libraries.scale.sws_freeContext.restype = None
        libraries.util.av_get_pix_fmt.argtypes = [ctypes.c_char_p]
    except (OSError, AttributeError):
        return None
    return libraries


def _agrees(scaler: _Scaler) -> bool:
    size = 64
    luma = np.arange(size * size, dtype=np.uint8).reshape(size, size)
    frame = av.VideoFrame.from_ndarray(np.concatenate([luma, luma[: size // 2]]), format="yuv420p")
    out = np.zeros((size, size, 3), np.uint8)
    done = scaler.convert(frame, (size, size), out)
    scaler.close()
    return done and np.array_equal(out, frame.to_ndarray(format="rgb24", interpolation="BICUBIC"))


@functools.cache
def _checked() -> _Libraries | None:
    """The libraries, or None where they are not found or do not do what PyAV does."""
    libraries = _load()
    return libraries if libraries is not None and _agrees(_Scaler(libraries)) else None
