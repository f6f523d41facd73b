"""What a process of the pool does: it decodes pictures, and calls the HF processor."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from PIL import ExifTags, Image, ImageFile

from vllm_omni_sched import compat
from vllm_omni_sched.config.errors import UnsupportedValueError
from vllm_omni_sched.engine.preprocess.pictures import decoded
from vllm_omni_sched.imports import wrap_once
from vllm_omni_sched.preprocess.values import Picture, Pixels

_BLOCK_BYTES = 1 << 24
"""Bytes that Pillow reads of a file, and writes of an array, at a time; by default so few that an array is copied once
more to join them."""
_TURNED = range(2, 9)  # EXIF orientations of pictures that are not upright


class PoolWork:
    """Prepares the items of a request as vLLM does, with its own code.

    Args:
        processor: vLLM's multimodal processor of the model.
        load_bytes: vLLM's own decoder of pictures.
    """

    def __init__(self, processor: Any, load_bytes: Callable[..., Any]) -> None:
        self._processor, self._load_bytes = processor, load_bytes
        self._apply = processor._apply_hf_processor_main
        self._helpers: ThreadPoolExecutor | None = None  # threads do not outlive a fork

    def __call__(self, payload: Any, threads: Callable[[], int]) -> dict[str, Any]:
        """Return the data of the HF processor's result.

        Args:
            threads: returns how many threads may decode pictures now.

        Raises:
            UnsupportedValueError: vLLM must prepare these items itself.
            ValueError: the items cannot be prepared.
        """
        from transformers.feature_extraction_utils import BatchFeature

        if self._helpers is None:
            self._helpers = ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) - 1))
            spare_copies()
        sent, kwargs = payload
        items = {modality: each(self._item, found, threads, self._helpers) for modality, found in sent.items()}
        with compat.default_torch_threads():
            result = self._apply(self._processor.info.parse_mm_data(items, validate=False), kwargs)
        if not isinstance(result, BatchFeature):
            raise UnsupportedValueError(f"the HF processor returns {type(result).__qualname__}, not BatchFeature")
        return dict(result.data)

    def _item(self, sent: Any) -> Any:
        if isinstance(sent, Picture):
            return decoded(self._load_bytes, sent)
        if isinstance(sent, Pixels):
            return Image.fromarray(sent.array, sent.mode)
        return sent


def each(
    function: Callable[[Any], Any], items: Sequence[Any], threads: Callable[[], int], helpers: ThreadPoolExecutor
) -> list[Any]:
    """Return the function's results for all items, computed by this thread and by as many helpers as there may be.

    Args:
        threads: asked before each item that this thread begins; helpers that have begun stay until no item is left.

    Raises:
        Exception: what the function has raised for the first of the items for which it raises.
    """
    found: list[Any] = [None] * len(items)
    errors: dict[int, Exception] = {}
    numbers = iter(range(len(items)))  # every number goes to one thread

    def work_on(number: int) -> None:
        try:
            found[number] = function(items[number])
        except Exception as error:  # noqa: BLE001 - raised below
            errors[number] = error
            for _ in numbers:  # the others are not needed any more
                pass

    def help_() -> None:
        for number in numbers:
            work_on(number)

    working: list[Future[None]] = []
    for number in numbers:
        while len(working) + 1 < min(threads(), len(items) - number):
            working.append(helpers.submit(help_))
        work_on(number)
    for helper in working:
        helper.result()
    if errors:
        raise errors[min(errors)]
    return found


def spare_copies() -> None:
    """Let this process, which alone has its pictures, decode them with fewer copies; the pixels are the same."""
    ImageFile.MAXBLOCK = max(ImageFile.MAXBLOCK, _BLOCK_BYTES)
    for module in compat.upright_modules():
        wrap_once(module, "normalize_image", upright_without_copy)


def upright_without_copy(normalize_image: Callable[..., Any]) -> Callable[..., Any]:
    """Return vLLM's function that turns a picture upright, or copies it if it is upright, without that copy."""

    @functools.wraps(normalize_image)
    def wrapper(image: Any) -> Any:
        with contextlib.suppress(Exception):  # as vLLM's own
            image.load()
            if image.getexif().get(ExifTags.Base.Orientation, 1) not in _TURNED:
                return image._new(image.im)  # as `copy` does, except that the pixels are not copied
        return normalize_image(image)

    return wrapper
