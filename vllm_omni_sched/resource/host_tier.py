"""Which evicted encodings to keep in host memory."""

import math
from dataclasses import dataclass, replace
from enum import Enum
from heapq import heapify, heappop, heappush

from vllm_omni_sched.errors import ConfigError
from vllm_omni_sched.resource.worth import Encoding


class HostReason(str, Enum):
    """Why an encoding is kept, or not."""

    RESTORE_IS_QUICKER = "restore_is_quicker"  # kept
    ALREADY_KEPT = "already_kept"  # kept since before
    ENCODE_IS_QUICKER = "encode_is_quicker"  # not kept
    TOO_LARGE = "too_large"  # not kept: larger than the tier
    NOT_WORTH_THE_ROOM = "not_worth_the_room"  # not kept: something worth more would have to go
    IN_USE = "in_use"  # not kept: what would have to go is being restored


@dataclass(frozen=True)
class HostDecision:
    """Whether to keep an encoding, why, and what to drop for it (by ``mm_hash``, in that order)."""

    keep: bool
    reason: HostReason
    dropped: tuple[str, ...] = ()


class HostTier:
    """The books of a bounded tier in host memory; O(log n) per encoding that comes or goes.

    1. An encoding is worth keeping only if restoring it is quicker than encoding it again. Its worth is
       the seconds that saves x decayed uses / bytes.
    2. It makes room by dropping what is worth least, but nothing that is worth as much as itself,
       and nothing that is held (being restored). If that is not enough, nothing is dropped.
    3. What is kept already and was used again is worth what it is worth now.
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
        self._heap: list[tuple[float, str]] = []  # one entry at least for each that is kept

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, mm_hash: object) -> bool:
        return mm_hash in self._kept

    def offer(self, encoding: Encoding, restore_seconds: float) -> HostDecision:
        """Decide on an encoding that was evicted from the device; enter it if it is to be kept.

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
        now = replace(encoding, num_bytes=kept.num_bytes)  # what it takes here does not change
        worth = _log_worth(now, saved)
        self._kept[now.mm_hash] = now, worth
        heappush(self._heap, (worth, now.mm_hash))
        self._sweep()

    def hold(self, mm_hash: str) -> Encoding:
        """It is being restored: do not drop it before `release`.

        Raises:
            KeyError: it is not kept.
        """
        encoding, _ = self._kept[mm_hash]
        self._held[mm_hash] = self._held.get(mm_hash, 0) + 1
        return encoding

    def release(self, mm_hash: str) -> None:
        """It was restored.

        Raises:
            ValueError: nobody holds it.
        """
        holders = self._held.get(mm_hash, 0)
        if holders == 0:
            raise ValueError(f"{mm_hash} is released more often than it was held")
        if holders == 1:
            del self._held[mm_hash]
        else:
            self._held[mm_hash] = holders - 1

    def drop(self, mm_hash: str) -> None:
        """Take it out, say because its memory is gone.

        Raises:
            KeyError: it is not kept.
            ValueError: it is held.
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
                continue  # of something that went before
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
