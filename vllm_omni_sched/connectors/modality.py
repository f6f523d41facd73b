"""Kinds of data in messages."""

from __future__ import annotations

from enum import Enum
from functools import lru_cache

from vllm_omni_sched.connectors.framing import Message

_IDS = {"bool", "int32", "int64", "uint32", "uint64"}
_SAMPLES = {"int16"}


class Modality(str, Enum):
    """Kind of data in a message, which determines its pool."""

    TEXT = "text"
    IMAGE = "image"
    AUDIO = "audio"


def modality_of(message: Message) -> Modality:
    """Classify a message by its longest buffer: ids are text; PCM or one-dimensional floats audio; the rest images."""
    return _modality_of(*message.longest) if message.longest else Modality.TEXT


@lru_cache(maxsize=64)
def _modality_of(dtype: str, dimensions: int) -> Modality:
    if dtype in _IDS:
        return Modality.TEXT
    if dtype in _SAMPLES or (dimensions == 1 and dtype.startswith(("float", "bfloat"))):
        return Modality.AUDIO
    return Modality.IMAGE
