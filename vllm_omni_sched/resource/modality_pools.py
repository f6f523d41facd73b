"""Split memory between modalities: each has a guaranteed share and lends what it does not use."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from vllm_omni_sched.errors import ConfigError
from vllm_omni_sched.resource.moving_shares import MovingShares, ShareReason

DEFAULT_SHARES: Mapping[str, float] = {"text": 0.1, "image": 0.4, "audio": 0.1, "video": 0.4}


class GrantReason(str, Enum):
    """Source of the granted bytes."""

    OWN = "own"  # from the modality's guarantee
    BORROWED = "borrowed"  # at least in part from unused guarantees of others


class RefusalReason(str, Enum):
    """Reason why bytes are refused."""

    TOO_LARGE = "too_large"  # larger than all pools together
    NO_ROOM = "no_room"  # beyond its guarantee, and not enough is free to lend
    LENT = "lent"  # guaranteed, but lent to others until they release it


@dataclass(frozen=True)
class Grant:
    """Bytes that belong to a modality until they are released."""

    grant_id: int
    modality: str
    num_bytes: int
    reason: GrantReason


@dataclass(frozen=True)
class Refusal:
    """A refused reservation; ``missing_bytes`` would have to become free."""

    reason: RefusalReason
    missing_bytes: int


class Pools:
    """Accounting of ``total_bytes``; it holds no memory itself.

    1. A modality is guaranteed ``total_bytes`` x its share. It may borrow what is free beyond that, except bytes that
       another modality was refused from its guarantee and still waits for.
    2. Only free bytes are granted: a modality whose guarantee is lent is refused until the others have released it.
    3. A modality that was refused its guarantee has until the second ``adapt()`` to retry; then others may borrow it.
    4. ``adapt()``, called once per interval, moves the shares towards the demand (see ``MovingShares``).
    5. A modality with a share of 0 has no guarantee, and gets none by rule 4: it only borrows.

    Args:
        total_bytes: 1 or more.
        shares: of each modality, 0 or more, at most 1 together.

    Raises:
        ConfigError: an argument is out of range.
    """

    def __init__(self, total_bytes: int, shares: Mapping[str, float] = DEFAULT_SHARES) -> None:
        if total_bytes < 1:
            raise ConfigError(f"total_bytes must be 1 or more, got {total_bytes}")
        if not shares:
            raise ConfigError("shares must name at least one modality")
        for modality, share in shares.items():
            if not 0 <= share <= 1:
                raise ConfigError(f"the share of {modality!r} must be in [0, 1], got {share}")
        if math.fsum(shares.values()) > 1 + 1e-9:
            raise ConfigError(f"shares must add up to at most 1, got {math.fsum(shares.values())}")
        self.total_bytes = total_bytes
        self.shares = dict(shares)
        self._moves = [modality for modality, share in shares.items() if share]
        self._moving = MovingShares()
        self._used = dict.fromkeys(shares, 0)
        self._peak = dict.fromkeys(shares, 0)  # most bytes wanted at once in this interval
        self._claims: dict[str, tuple[int, int]] = {}  # refused bytes, and the interval of the refusal
        self._interval = 0
        self._grants: dict[int, Grant] = {}
        self._number = 0

    @property
    def free_bytes(self) -> int:
        """Return the bytes that are not granted."""
        return self.total_bytes - sum(self._used.values())

    def used_bytes(self, modality: str) -> int:
        """Return the bytes granted to the modality."""
        return self._used[self._known(modality)]

    def guaranteed_bytes(self, modality: str) -> int:
        """Return the guaranteed bytes, available now or once others have released what was lent."""
        return int(self.total_bytes * self.shares[self._known(modality)])

    def reserve(self, modality: str, num_bytes: int) -> Grant | Refusal:
        """Reserve bytes for the modality, or return why they are refused.

        Raises:
            ValueError: the modality is unknown, or the number is negative.
        """
        used = self.used_bytes(modality)
        if num_bytes < 0:
            raise ValueError(f"num_bytes must be 0 or more, got {num_bytes}")
        if num_bytes > self.total_bytes:
            return Refusal(RefusalReason.TOO_LARGE, num_bytes - self.total_bytes)
        self._peak[modality] = max(self._peak[modality], used + num_bytes)
        if used + num_bytes <= self.guaranteed_bytes(modality):
            if num_bytes > self.free_bytes:
                claimed = max(self._claims.get(modality, (0, 0))[0], num_bytes)
                self._claims[modality] = claimed, self._interval
                return Refusal(RefusalReason.LENT, num_bytes - self.free_bytes)
            self._claims.pop(modality, None)
            return self._grant(modality, num_bytes, GrantReason.OWN)
        missing = num_bytes - (self.free_bytes - self._claimed(besides=modality))
        if missing > 0:
            return Refusal(RefusalReason.NO_ROOM, missing)
        return self._grant(modality, num_bytes, GrantReason.BORROWED)

    def release(self, grant: Grant) -> bool:
        """Give the bytes back; False if they were given back before."""
        if self._grants.pop(grant.grant_id, None) is None:
            return False
        self._used[grant.modality] -= grant.num_bytes
        return True

    def adapt(self) -> ShareReason:
        """End an interval: move the shares if the demand asks for it, and return the reason."""
        moved, reason = self._moving.next(
            {modality: self.shares[modality] for modality in self._moves},
            {modality: self._peak[modality] / self.total_bytes for modality in self._moves},
        )
        self.shares |= moved
        self._peak = dict(self._used)
        self._interval += 1
        for modality, (num_bytes, since) in list(self._claims.items()):
            allowed = self.guaranteed_bytes(modality) - self._used[modality]
            if since < self._interval - 1 or allowed <= 0:
                del self._claims[modality]
            else:  # its guarantee may be smaller now
                self._claims[modality] = min(num_bytes, allowed), since
        return reason

    def _grant(self, modality: str, num_bytes: int, reason: GrantReason) -> Grant:
        grant = Grant(self._number, modality, num_bytes, reason)
        self._number += 1
        self._grants[grant.grant_id] = grant
        self._used[modality] += num_bytes
        return grant

    def _claimed(self, besides: str | None = None) -> int:
        """Return the bytes that were refused to modalities within their guarantee, except ``besides``."""
        return sum(num_bytes for modality, (num_bytes, _) in self._claims.items() if modality != besides)

    def _known(self, modality: str) -> str:
        if modality not in self._used:
            raise ValueError(f"unknown modality {modality!r}; known modalities are {', '.join(self._used)}")
        return modality
