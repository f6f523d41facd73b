"""Processes of the preprocessing pool copy pictures less, on more threads, and give the same pixels."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile

from tests.engine.harness.preprocessing import KINDS, encoded
from vllm_omni_sched import compat
from vllm_omni_sched.engine.preprocess.work import spare_copies, upright_without_copy

pytestmark = pytest.mark.engine


@pytest.fixture
def few_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageFile, "MAXBLOCK", ImageFile.MAXBLOCK)
    for module in compat.upright_modules():
        monkeypatch.setattr(module, "normalize_image", module.normalize_image)
    spare_copies()


def facts(image: Image.Image) -> tuple[Any, ...]:
    return type(image), image.mode, image.size, image.info, image.getpalette(), dict(image.getexif())


def turned(orientation: int, kind: str = "JPEG") -> bytes:
    exif, out = Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    Image.open(io.BytesIO(encoded(0, "PNG"))).save(out, kind, exif=exif)
    return out.getvalue()


@pytest.mark.parametrize("data", [*(encoded(3, kind) for kind in KINDS), *map(turned, range(10)), turned(3, "PNG")])
def test_pictures_are_upright_as_by_vllm(data: bytes) -> None:
    from vllm.multimodal.image import normalize_image

    theirs = normalize_image(Image.open(io.BytesIO(data)))
    ours = upright_without_copy(normalize_image)(Image.open(io.BytesIO(data)))
    assert facts(ours) == facts(theirs)
    assert np.array_equal(np.asarray(ours), np.asarray(theirs))


def test_a_picture_that_cannot_be_decoded_is_left_to_vllm() -> None:
    asked: list[Image.Image] = []

    def notes(image: Image.Image) -> Image.Image:
        asked.append(image)
        return image

    image = Image.open(io.BytesIO(encoded(0, "JPEG")[:1500]))
    assert upright_without_copy(notes)(image) is image
    assert asked == [image]


@pytest.mark.parametrize("end", [1 << 30, 60_000, 300_000, -1])
def test_a_file_is_decoded_as_in_small_blocks(monkeypatch: pytest.MonkeyPatch, few_copies: None, end: int) -> None:
    data = encoded(0, "JPEG", (900, 600))[:end]
    assert len(data) > 50_000

    def outcome() -> Any:
        try:
            image = Image.open(io.BytesIO(data))
            image.load()
            return image.tobytes(), np.asarray(image).tobytes()
        except OSError as error:
            return str(error)

    large = outcome()
    assert len(data) < ImageFile.MAXBLOCK
    monkeypatch.setattr(ImageFile, "MAXBLOCK", 1 << 16)
    assert outcome() == large


def test_vllms_decoder_makes_no_copy(few_copies: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.multimodal.media.image import ImageMediaIO

    def copies(image: Image.Image) -> Image.Image:
        raise AssertionError

    monkeypatch.setattr(Image.Image, "copy", copies)
    assert ImageMediaIO().load_bytes(encoded(0, "JPEG")).media.size == (90, 70)
