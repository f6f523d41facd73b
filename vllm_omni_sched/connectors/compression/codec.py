"""Interface of all codecs."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from vllm_omni_sched.config.errors import CorruptDataError
from vllm_omni_sched.connectors.compression.dtypes import FLOATS, ITEM_BYTES, Bytes, num_bytes


class Kind(str, Enum):
    """Kind of a buffer's content, as far as codecs need it."""

    IDS = "ids"
    FEATURES = "features"
    AUDIO = "audio"
    OTHER = "other"


def kind_of(dtype: str, shape: tuple[int, ...]) -> Kind:
    """Guess the kind of a buffer. Only the first two rules give kinds that lossy codecs take.

    1. int16 is audio, because only PCM uses it.
    2. Floats with a last dimension of 16 or more are features: hidden states, embeddings, latents.
    3. int32 and int64 are ids; everything else is other, including float PCM unless its owner names its kind.
    """
    if dtype == "int16":
        return Kind.AUDIO
    if dtype in FLOATS and len(shape) >= 2 and shape[-1] >= 16:
        return Kind.FEATURES
    return Kind.IDS if dtype in ("int32", "int64") else Kind.OTHER


@dataclass(frozen=True)
class ErrorBound:
    """States the error bound of a lossy codec: ``|decoded - x| <= of_value * |x| + of_peak * peak + absolute``.

    ``peak`` is the largest magnitude in the channel of x, or in the whole buffer, depending on the codec.
    """

    of_value: float = 0.0
    of_peak: float = 0.0
    absolute: float = 0.0

    def limit(
        self, values: npt.NDArray[np.floating], peak: float | npt.NDArray[np.floating]
    ) -> npt.NDArray[np.float64]:
        """Return the largest error that each of ``values`` may have."""
        limit: npt.NDArray[np.float64] = self.of_value * np.abs(values).astype(np.float64)
        return limit + (self.of_peak * peak + self.absolute)


class Codec(ABC):
    """Codec that encodes buffers into fewer bytes, and decodes them.

    1. `decode` needs only the result of `encode`, data type and shape.
    2. A lossless codec restores the same bits. A lossy one keeps its `error_bound` for every value, or declines.
    3. `decode` raises on data that `encode` cannot have written, and writes only into ``out``. It does not detect
       changed bits in valid data: the transport is responsible for integrity.
    4. Codecs hold no state of a buffer, so that several threads may use one.
    """

    name: ClassVar[str]
    lossy: ClassVar[bool] = False
    kinds: ClassVar[frozenset[Kind]] = frozenset(Kind)  # kinds of buffers on which it is tried
    max_bytes: ClassVar[int] = 1 << 40

    @abstractmethod
    def takes(self, dtype: str, shape: tuple[int, ...]) -> bool:
        """Return whether tensors of this type and shape can be encoded at all."""

    def suits(self, dtype: str, shape: tuple[int, ...]) -> bool:
        """Return the answer of `takes` for a known data type and a size within the limit."""
        return dtype in ITEM_BYTES and num_bytes(dtype, shape) <= self.max_bytes and self.takes(dtype, shape)

    def encode(self, raw: Bytes, dtype: str, shape: tuple[int, ...]) -> Bytes | None:
        """Encode ``raw`` into a flat buffer, which may be larger; return None if its values do not suit this codec.

        Raises:
            ValueError: ``raw`` is not a flat contiguous array of the stated size, or `takes` is false.
        """
        check_buffer(raw, dtype, shape)
        if not self.suits(dtype, shape):
            raise ValueError(f"codec {self.name} does not take {dtype} of shape {shape}")
        return self._encode(raw, dtype, shape) if raw.size else np.empty(0, np.uint8)

    def decode(
        self, data: bytes | bytearray | memoryview | Bytes, dtype: str, shape: tuple[int, ...], out: Bytes
    ) -> None:
        """Decode ``data`` into ``out``, which is flat and of the size that type and shape give.

        Raises:
            CorruptDataError: ``data`` cannot be a result of `encode`; the content of ``out`` is undefined then.
            ValueError: ``out`` is not writeable, flat, contiguous and of the stated size.
        """
        check_buffer(out, dtype, shape)
        if not out.flags.writeable:
            raise ValueError("out must be writeable")
        flat = np.frombuffer(data, np.uint8)
        if not self.suits(dtype, shape):
            raise self._corrupt(f"it never holds {dtype} of shape {shape}")
        if out.size:
            self._decode(flat, dtype, shape, out)
        elif flat.size:
            raise self._corrupt(f"{flat.size} bytes for an empty tensor")

    def error_bound(self, dtype: str) -> ErrorBound | None:
        """Return the error bound for this data type; None for a lossless codec."""
        return None

    def _corrupt(self, what: str) -> CorruptDataError:
        return CorruptDataError(f"not data of codec {self.name}: {what}")

    @abstractmethod
    def _encode(self, raw: Bytes, dtype: str, shape: tuple[int, ...]) -> Bytes | None:
        """Encode a buffer that is not empty."""

    @abstractmethod
    def _decode(self, data: Bytes, dtype: str, shape: tuple[int, ...], out: Bytes) -> None:
        """Decode into a buffer that is not empty."""


def check_buffer(raw: Bytes, dtype: str, shape: tuple[int, ...]) -> None:
    """Check that ``raw`` is a tensor of this type and shape as flat bytes.

    Raises:
        ValueError: it is not.
    """
    expected = num_bytes(dtype, shape)
    if raw.dtype != np.uint8 or raw.ndim != 1 or not raw.flags.c_contiguous:
        raise ValueError(f"a buffer must be a flat contiguous array of uint8, got {raw.ndim} dimensions of {raw.dtype}")
    if raw.size != expected:
        raise ValueError(f"{dtype} of shape {shape} is {expected} bytes, got {raw.size}")
