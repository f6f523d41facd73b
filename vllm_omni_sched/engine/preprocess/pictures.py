"""Pictures whose header is read in the API process, and whose pixels are decoded where they are needed.

vLLM decodes a picture when it receives it, on a thread of the API process. Here `ImageMediaIO.load_bytes` returns an
`UndecodedPicture`, which knows its size and mode; a process of the pool decodes it, right before the HF processor. If
code of the API process asks for pixels after all, vLLM's own decoder gives them.
"""

from __future__ import annotations

import copy
import functools
import io
import threading
from collections.abc import Callable
from typing import Any

from PIL import ExifTags, Image

from vllm_omni_sched import compat
from vllm_omni_sched.config.errors import UnsupportedValueError
from vllm_omni_sched.engine.preprocess.metrics import Fallback
from vllm_omni_sched.preprocess.values import Picture

_FORMATS = ("JPEG", "PNG", "WEBP")  # their header says what mode and size they have once they are decoded
_MODE = "RGB"  # to which vLLM converts all pictures by default, and again when it prepares them
_QUARTER_TURNS = (5, 6, 7, 8)  # EXIF orientations that swap width and height
_FORGOTTEN = {"transparency", "Raw profile type exif"}  # facts of a file that change how it is decoded

_reading_header = threading.Lock()
"""Held while a header is read: otherwise vLLM's threads that load pictures would keep Python's lock from the event
loop, one after the other."""

Observe = Callable[[Fallback], None]


class UndecodedPicture(Image.Image):
    """A picture of known size and mode, which vLLM's decoder decodes when its pixels are asked for.

    Attributes:
        sent: the picture as it is sent to a process of the pool.
    """

    sent: Picture | None = None
    _decode: Callable[[], Image.Image] | None = None

    @classmethod
    def of(cls, sent: Picture, decode: Callable[[], Image.Image], info: dict[Any, Any]) -> UndecodedPicture:
        """Return the picture; ``decode`` returns it decoded, and may raise what vLLM raises."""
        picture = cls()
        picture.sent, picture._decode, picture._lock = sent, decode, threading.Lock()  # type: ignore[attr-defined]
        picture._size, picture._mode, picture.info = sent.size, sent.mode, info
        return picture

    @property
    def undecoded(self) -> bool:
        """Return whether nobody has asked for its pixels yet."""
        return self._decode is not None

    def load(self) -> Any:
        if self._decode is not None:
            with self._lock:  # type: ignore[attr-defined]
                if self._decode is not None:
                    decoded = self._decode()
                    decoded.load()
                    self.im, self._size, self._mode = decoded.im, decoded.size, decoded.mode
                    self.palette, self.info = decoded.palette, decoded.info
                    self._decode = self.sent = None
        return super().load()

    def __deepcopy__(self, memo: dict[int, Any]) -> Image.Image:
        return self.copy()


def undecoded_loading(load_bytes: Callable[..., Any], observe: Observe) -> Callable[..., Any]:
    """Return ``ImageMediaIO.load_bytes`` with pictures that are not decoded; ``load_bytes`` is vLLM's own."""

    @functools.wraps(load_bytes)
    def wrapper(self: Any, data: bytes) -> Any:
        if type(self).__name__ != "ImageMediaIO" or self.image_mode != _MODE:
            return load_bytes(self, data)
        with _reading_header:
            found = _header(data)
        if found is None or not compat.admits_picture(self, *found[0]):
            observe(Fallback.FORMAT)
            return load_bytes(self, data)
        size, mode, info = found
        sent = Picture(data, self.image_mode, dict(self.kwargs), size, mode != self.image_mode)

        def decode() -> Image.Image:
            observe(Fallback.LOADED)
            media_io = copy.copy(self)
            media_io.decoded_budget = None  # charged already
            found: Image.Image = load_bytes(media_io, data).media
            return found

        return compat.media_with_bytes(
            UndecodedPicture.of(sent, decode, info), data, _io_config(self) if sent.converted else None
        )

    return wrapper


def leaves_undecoded(normalize_image: Callable[..., Any]) -> Callable[..., Any]:
    """Return vLLM's function that turns a picture upright, for which it is decoded; one that is not decoded yet will be
    turned then.
    """

    @functools.wraps(normalize_image)
    def wrapper(image: Any) -> Any:
        if isinstance(image, UndecodedPicture) and image.undecoded:
            return image
        return normalize_image(image)

    return wrapper


def _io_config(media_io: Any) -> dict[str, Any]:
    """Return the settings that vLLM hashes with a picture whose mode they have changed."""
    return {"image_mode": media_io.image_mode, "rgba_background_color": media_io.rgba_background_color}


def _header(data: bytes) -> tuple[tuple[int, int], str, dict[Any, Any]] | None:
    """Return size, mode and info of a picture, as they are once it is decoded; None if its header does not say."""
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as opened:
            if (
                opened.format not in _FORMATS
                or getattr(opened, "is_animated", False)
                or not _FORGOTTEN.isdisjoint(opened.info)
            ):
                return None
            width, height = opened.size
            # the EXIF data of a PNG may follow its pixels, and its own `getexif` decodes them to find it
            exif = Image.Image.getexif(opened)
            if exif.get(ExifTags.Base.Orientation) in _QUARTER_TURNS:
                width, height = height, width
            return (width, height), opened.mode, dict(opened.info)
    except Exception:  # noqa: BLE001 - vLLM's own decoder says what is wrong with it
        return None


def decoded(load_bytes: Callable[..., Any], picture: Picture) -> Image.Image:
    """Return a picture decoded by vLLM's decoder; called in a process of the pool.

    Raises:
        UnsupportedValueError: it is not what its header says.
        ValueError: it cannot be decoded.
    """
    media_io = compat.image_media_io()(image_mode=picture.mode, **picture.settings)
    loaded = load_bytes(media_io, bytes(picture.data))
    image: Image.Image = loaded.media
    if (image.size, image.mode, loaded.io_config is not None) != (picture.size, picture.mode, picture.converted):
        raise UnsupportedValueError("a picture has another size or mode than its header says")
    return image
