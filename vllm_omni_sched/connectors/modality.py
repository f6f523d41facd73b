"""What a message is made of."""

from __future__ import annotations

from enum import Enum

from vllm_omni_sched.connectors.framing import Message

_IDS = {"bool", "int32", "int64", "uint32", "uint64"}
_SAMPLES = {"int16"}


class Modality(str, Enum):
    """What a message is made of, and so the pool it lies in."""

    TEXT = "text"
    IMAGE = "image"
    AUDIO = "audio"


def modality_of(message: Message) -> Modality:
    """By its longest buffer: ids are text; PCM, or floats in one row, are audio; the rest is features or pixels."""
    if not message.longest:
        return Modality.TEXT
    dtype, dimensions = message.longest
    if dtype in _IDS:
        return Modality.TEXT
    if dtype in _SAMPLES or (dimensions == 1 and dtype.startswith(("float", "bfloat"))):
        return Modality.AUDIO
    return Modality.IMAGE
