"""Decide which evicted encodings to keep in host memory."""

import math
from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True)
class Encoding:
    """An encoder output; ``encode_seconds`` is the time to encode it again.

    Raises:
        ValueError: the size is not above 0, or the time is negative or not finite.
    """

    mm_hash: str
    num_bytes: int
    encode_seconds: float

    def __post_init__(self) -> None:
        if self.num_bytes < 1:
            raise ValueError(f"{self.mm_hash}: num_bytes must be 1 or more, got {self.num_bytes}")
        if not 0 <= self.encode_seconds < math.inf:
            raise ValueError(f"{self.mm_hash}: encode_seconds must be finite and >= 0, got {self.encode_seconds}")


class HostReason(str, Enum):
    """Reason why an encoding is kept or not."""

    RESTORE_IS_QUICKER = "restore_is_quicker"  # kept
    ALREADY_KEPT = "already_kept"  # kept already
    ENCODE_IS_QUICKER = "encode_is_quicker"  # not kept
    TOO_LARGE = "too_large"  # not kept: larger than the tier
    IN_USE = "in_use"  # not kept: those that would have to be dropped are being restored


@dataclass(frozen=True)
class HostDecision:
    """Decision on keeping an encoding, the reason, and the encodings to drop for it (by ``mm_hash``, in that order)."""

    keep: bool
    reason: HostReason
    dropped: tuple[str, ...] = ()


class HostTier:
    """Accounting of a bounded tier in host memory, which drops the least recently used encodings.

    1. An encoding is kept only if restoring it is quicker than encoding it again.
    2. It makes room by dropping the encodings that were offered or restored longest ago, but none that is held (being
       restored). If that is not enough, nothing is dropped.
    3. The bytes kept never exceed ``max_bytes``; 0 turns the tier off.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._kept: OrderedDict[str, Encoding] = OrderedDict()  # the least recently used one comes first
        self._held: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, mm_hash: object) -> bool:
        return mm_hash in self._kept

    def offer(self, encoding: Encoding, restore_seconds: float) -> HostDecision:
        """Decide on an encoding that was evicted from the device, and add it if it is to be kept.

        Raises:
            ValueError: ``restore_seconds`` is negative or not finite.
        """
        if not 0 <= restore_seconds < math.inf:
            raise ValueError(f"restore_seconds must be finite and >= 0, got {restore_seconds}")
        if encoding.mm_hash in self._kept:
            self._kept.move_to_end(encoding.mm_hash)
            return HostDecision(True, HostReason.ALREADY_KEPT)
        if encoding.encode_seconds <= restore_seconds:
            return HostDecision(False, HostReason.ENCODE_IS_QUICKER)
        if encoding.num_bytes > self.max_bytes:
            return HostDecision(False, HostReason.TOO_LARGE)
        victims = self._room_for(encoding.num_bytes)
        if victims is None:
            return HostDecision(False, HostReason.IN_USE)
        for mm_hash in victims:
            self._forget(mm_hash)
        self._kept[encoding.mm_hash] = encoding
        self.num_bytes += encoding.num_bytes
        return HostDecision(True, HostReason.RESTORE_IS_QUICKER, tuple(victims))

    def hold(self, mm_hash: str) -> Encoding:
        """Hold an encoding while it is being restored, so that it is not dropped before `release`.

        Raises:
            KeyError: the encoding is not kept.
        """
        encoding = self._kept[mm_hash]
        self._kept.move_to_end(mm_hash)
        self._held[mm_hash] = self._held.get(mm_hash, 0) + 1
        return encoding

    def release(self, mm_hash: str) -> None:
        """Release an encoding that was restored.

        Raises:
            ValueError: the encoding is not held.
        """
        holders = self._held.get(mm_hash, 0)
        if holders == 0:
            raise ValueError(f"{mm_hash} is released more often than it was held")
        if holders == 1:
            del self._held[mm_hash]
        else:
            self._held[mm_hash] = holders - 1

    def drop(self, mm_hash: str) -> None:
        """Drop an encoding, for example because its memory is gone.

        Raises:
            KeyError: the encoding is not kept.
            ValueError: the encoding is held.
        """
        if mm_hash in self._held:
            raise ValueError(f"{mm_hash} is being restored; drop it after release()")
        self._forget(mm_hash)

    def _forget(self, mm_hash: str) -> None:
        self.num_bytes -= self._kept.pop(mm_hash).num_bytes

    def _room_for(self, num_bytes: int) -> list[str] | None:
        """Return the encodings to drop for so many bytes; None if there is no room even without all that may go."""
        needed, victims = self.num_bytes + num_bytes - self.max_bytes, list[str]()
        for mm_hash, encoding in self._kept.items():
            if needed <= 0:
                break
            if mm_hash not in self._held:
                victims.append(mm_hash)
                needed -= encoding.num_bytes
        return victims if needed <= 0 else None
