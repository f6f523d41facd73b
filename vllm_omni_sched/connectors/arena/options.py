"""Options of the arena, with their defaults, as given in ``extra`` of a connector in vLLM-Omni's stage config."""

from __future__ import annotations

import re
from enum import Enum
from functools import lru_cache

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from vllm_omni_sched.connectors.bounds import Count, MemoryBytes, Seconds, StoredBytes
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


KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def arena_name(value: str) -> str:
    """Check that a name is safe as the name of a directory, and return it.

    Raises:
        ValueError: it is not.
    """
    if not (_NAME.fullmatch(value) and value.strip(".")):
        raise ValueError("must be 1 to 64 letters, digits, '.', '_' or '-', and not only dots")
    return value


class PoolOptions(BaseModel):
    """Options of one pool: its initial size, its bound and its growth."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    block_bytes: MemoryBytes = Field(ge=64, description="Room is allocated in multiples of it.")
    initial_bytes: MemoryBytes = Field(
        4 * MIB,
        ge=64 * KIB,
        description="Memory allocated when the pool is first used; of more than 32 MiB, the rest in the background.",
    )
    max_bytes: MemoryBytes = Field(ge=64 * KIB, description="Largest size of the pool.")
    inline_bytes: MemoryBytes = Field(64 * KIB, ge=0, description="Payloads up to this size go through the ring.")

    @model_validator(mode="after")
    def _consistent(self) -> PoolOptions:
        if self.max_bytes < self.initial_bytes:
            raise ValueError(f"max_bytes ({self.max_bytes}) must be at least initial_bytes ({self.initial_bytes})")
        if self.block_bytes % 64 or self.block_bytes > self.initial_bytes:
            raise ValueError(f"block_bytes ({self.block_bytes}) must be a multiple of 64, and fit into initial_bytes")
        return self


class TextPool(PoolOptions):
    """Pool for ids and other integers: many small messages."""

    block_bytes: MemoryBytes = Field(4 * KIB, ge=64)
    max_bytes: MemoryBytes = Field(1 * GIB, ge=64 * KIB)


class ImagePool(PoolOptions):
    """Pool for features and pixels: large blocks."""

    block_bytes: MemoryBytes = Field(8 * KIB, ge=64)
    max_bytes: MemoryBytes = Field(8 * GIB, ge=64 * KIB)


class AudioPool(PoolOptions):
    """Pool for samples: contiguous, of any length."""

    block_bytes: MemoryBytes = Field(4 * KIB, ge=64)
    max_bytes: MemoryBytes = Field(2 * GIB, ge=64 * KIB)


class ArenaOptions(BaseModel):
    """Options of the arena. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    directory: str = Field("/dev/shm", description="File system of the shared memory.")
    arena: str | None = Field(
        None,
        description="Name of the arena; processes with the same name see each other's messages; "
        "default: all processes that one vLLM-Omni has started.",
    )
    modality: Modality | None = Field(None, description="Pool of all messages; default: by the content of each.")
    text: TextPool = Field(TextPool(), description="The pool of ids.")
    image: ImagePool = Field(ImagePool(), description="The pool of features and pixels.")
    audio: AudioPool = Field(AudioPool(), description="The pool of samples.")
    growth_factor: float = Field(1.5, gt=1, le=4, allow_inf_nan=False, description="Factor by which a full pool grows.")
    ring_bytes: MemoryBytes = Field(8 * MIB, ge=64 * KIB, description="Size of the ring for small messages.")
    tune_inline: bool = Field(
        True,
        description="Fit `inline_bytes` to what receivers measure: down to a quarter of it or 32 KB, and up to 4 times "
        "as much or 1 MB, whichever is further.",
    )
    max_messages: int = Field(16384, ge=64, le=1 << 20, description="Most messages in flight per sending process.")
    max_inflight: Count | None = Field(
        None,
        ge=1,
        description="Most messages of an edge that are not received yet; beyond it, `put` waits for the receiver.",
    )
    window_size: StoredBytes | None = Field(
        None,
        ge=1,
        description="Most bytes of an edge that are not received yet; beyond it, `put` waits for the receiver.",
    )
    wake_receivers: bool = Field(
        True, description="Receivers sleep until a message is shown, and senders wake them; otherwise they only poll."
    )
    put_timeout_seconds: Seconds = Field(30.0, ge=0, description="How long `put` waits for room or for its receiver.")
    ttl_seconds: Seconds = Field(
        600.0, gt=0, description="Age at which a message that was not received is dropped, and counted."
    )
    copy_out: bool = Field(False, description="Receivers get copies, not views of shared memory.")
    checksum: bool = Field(
        False,
        description="Messages carry a CRC-32 of tensors above 4 KB, too, and one that was altered is an error. "
        "Everything else in a message always has one.",
    )

    @field_validator("arena")
    @classmethod
    def _file_name(cls, value: str | None) -> str | None:
        return None if value is None else arena_name(value)

    @field_validator("directory")
    @classmethod
    def _absolute(cls, value: str) -> str:
        if not value.startswith("/"):
            raise ValueError("must be absolute: the processes of an arena may work in different directories")
        return value

    def pool(self, modality: Modality) -> PoolOptions:
        """Return the options of one pool."""
        return {Modality.TEXT: self.text, Modality.IMAGE: self.image, Modality.AUDIO: self.audio}[modality]
