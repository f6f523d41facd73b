"""Decide which evicted encodings to keep in host memory."""

import math
from dataclasses import dataclass, replace
from enum import Enum
from heapq import heapify, heappop, heappush

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.resource.engine.worth import Encoding


class HostReason(str, Enum):
    """Reason why an encoding is kept or not."""

    RESTORE_IS_QUICKER = "restore_is_quicker"  # kept
    ALREADY_KEPT = "already_kept"  # kept already
    ENCODE_IS_QUICKER = "encode_is_quicker"  # not kept
    TOO_LARGE = "too_large"  # not kept: larger than the tier
    NOT_WORTH_THE_ROOM = "not_worth_the_room"  # not kept: an encoding worth more would have to be dropped
    IN_USE = "in_use"  # not kept: the one that would have to be dropped is being restored


@dataclass(frozen=True)
class HostDecision:
    """Decision on keeping an encoding, the reason, and the encodings to drop for it (by ``mm_hash``, in that order)."""

    keep: bool
    reason: HostReason
    dropped: tuple[str, ...] = ()


class HostTier:
    """Accounting of a bounded tier in host memory; O(log n) per encoding that is added or removed.

    1. An encoding is worth keeping only if restoring it is quicker than encoding it again. Its worth is
       the seconds saved x decayed uses / bytes.
    2. It makes room by dropping the encodings of least worth, but none that is worth at least as much as the new one,
       and none that is held (being restored). If that is not enough, nothing is dropped.
    3. An encoding that is kept already and was used again gets its current worth.
    4. The bytes kept never exceed ``max_bytes``; 0 turns the tier off.

    Raises:
        ConfigError: ``max_bytes`` is negative.
    """

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 0:
            raise ConfigError(f"max_bytes must be 0 or more, got {max_bytes}")
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._kept: dict[str, tuple[Encoding, float]] = {}  # with its worth
        self._held: dict[str, int] = {}
        self._heap: list[tuple[float, str]] = []  # at least one entry for each encoding that is kept

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
        saved = encoding.encode_seconds - restore_seconds
        if encoding.mm_hash in self._kept:
            if saved > 0:
                self._value_anew(encoding, saved)
            return HostDecision(True, HostReason.ALREADY_KEPT)
        if saved <= 0:
            return HostDecision(False, HostReason.ENCODE_IS_QUICKER)
        if encoding.num_bytes > self.max_bytes:
            return HostDecision(False, HostReason.TOO_LARGE)
        worth = _log_worth(encoding, saved)
        victims, refusal = self._room_for(encoding.num_bytes, worth)
        if refusal is not None:
            return HostDecision(False, refusal)
        for mm_hash in victims:
            self._forget(mm_hash)
        self._kept[encoding.mm_hash] = encoding, worth
        self.num_bytes += encoding.num_bytes
        heappush(self._heap, (worth, encoding.mm_hash))
        self._sweep()
        return HostDecision(True, HostReason.RESTORE_IS_QUICKER, tuple(victims))

    def _value_anew(self, encoding: Encoding, saved: float) -> None:
        kept, _ = self._kept[encoding.mm_hash]
        now = replace(encoding, num_bytes=kept.num_bytes)  # its size here does not change
        worth = _log_worth(now, saved)
        self._kept[now.mm_hash] = now, worth
        heappush(self._heap, (worth, now.mm_hash))
        self._sweep()

    def hold(self, mm_hash: str) -> Encoding:
        """Hold an encoding while it is being restored, so that it is not dropped before `release`.

        Raises:
            KeyError: the encoding is not kept.
        """
        encoding, _ = self._kept[mm_hash]
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
        self._sweep()

    def _forget(self, mm_hash: str) -> None:
        encoding, _ = self._kept.pop(mm_hash)
        self.num_bytes -= encoding.num_bytes

    def _room_for(self, num_bytes: int, worth: float) -> tuple[list[str], HostReason | None]:
        needed = self.num_bytes + num_bytes - self.max_bytes
        victims: dict[str, None] = {}
        looked_at: list[tuple[float, str]] = []
        refusal = None
        blocked = False
        while needed > 0:
            if not self._heap or self._heap[0][0] >= worth:
                refusal = HostReason.IN_USE if blocked else HostReason.NOT_WORTH_THE_ROOM
                break
            entry = heappop(self._heap)
            mm_hash = entry[1]
            if mm_hash not in self._kept or self._kept[mm_hash][1] != entry[0] or mm_hash in victims:
                continue  # stale entry
            looked_at.append(entry)
            if mm_hash in self._held:
                blocked = True
                continue
            victims[mm_hash] = None
            needed -= self._kept[mm_hash][0].num_bytes
        for entry in looked_at:
            if refusal is not None or entry[1] in self._held:
                heappush(self._heap, entry)
        return ([], refusal) if refusal is not None else (list(victims), None)

    def _sweep(self) -> None:
        if len(self._heap) > 2 * len(self._kept) + 64:
            self._heap = [(worth, mm_hash) for mm_hash, (_, worth) in self._kept.items()]
            heapify(self._heap)


def _log_worth(encoding: Encoding, saved: float) -> float:
    return math.log2(saved) + encoding.log_uses - math.log2(encoding.num_bytes)
