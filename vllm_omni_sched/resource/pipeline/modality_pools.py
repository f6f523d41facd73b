"""Split memory between modalities: each has a guaranteed share, which follows demand, and lends what is unused."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from vllm_omni_sched.config.errors import ConfigError


class ShareReason(str, Enum):
    """Reason for the current shares."""

    NO_DEMAND = "no_demand"  # no modality wanted anything
    CLOSE_ENOUGH = "close_enough"  # no share is further off than the hysteresis
    WAITING = "waiting"  # some are, but not for ``patience`` intervals yet
    MOVED = "moved"


class MovingShares:
    """Moves shares towards the demand, one decision per interval.

    1. The demand is a moving average of each interval's peak, with ``weight`` for the newest, from the shares on.
    2. The total of the shares is split in proportion to the demand, after ``least_share`` for each (or its
       present share, if that is less).
    3. If a share has been off by more than ``hysteresis`` for ``patience`` intervals, all move towards that split, none
       by more than ``max_move``.

    Raises:
        ConfigError: an argument is out of range.
    """

    def __init__(
        self,
        weight: float = 0.2,
        least_share: float = 0.05,
        hysteresis: float = 0.05,
        patience: int = 3,
        max_move: float = 0.05,
    ) -> None:
        ranges = {"weight": weight, "max_move": max_move}
        for name, value in ranges.items():
            if not 0 < value <= 1:
                raise ConfigError(f"{name} must be in (0, 1], got {value}")
        for name, value in {"least_share": least_share, "hysteresis": hysteresis}.items():
            if not 0 <= value < 1:
                raise ConfigError(f"{name} must be in [0, 1), got {value}")
        if patience < 1:
            raise ConfigError(f"patience must be 1 or more, got {patience}")
        self.weight = weight
        self.least_share = least_share
        self.hysteresis = hysteresis
        self.patience = patience
        self.max_move = max_move
        self._demand: dict[str, float] = {}
        self._off = 0  # intervals in a row

    def next(self, shares: Mapping[str, float], peaks: Mapping[str, float]) -> tuple[dict[str, float], ShareReason]:
        """Return the new shares; ``peaks``: the demand of the interval that has ended, in the unit of the shares."""
        for name in shares:
            before = self._demand.get(name, shares[name])
            self._demand[name] = before + self.weight * (peaks[name] - before)
        total = math.fsum(self._demand[name] for name in shares)
        if not any(peaks[name] for name in shares):
            self._off = 0
            return dict(shares), ShareReason.NO_DEMAND
        target = self._target(shares, total)
        furthest = max(abs(target[name] - share) for name, share in shares.items())
        if furthest <= self.hysteresis:
            self._off = 0
            return dict(shares), ShareReason.CLOSE_ENOUGH
        self._off += 1
        if self._off < self.patience:
            return dict(shares), ShareReason.WAITING
        part = min(1.0, self.max_move / furthest)
        return {name: share + part * (target[name] - share) for name, share in shares.items()}, ShareReason.MOVED

    def _target(self, shares: Mapping[str, float], total: float) -> dict[str, float]:
        least = {name: min(self.least_share, share) for name, share in shares.items()}
        rest = math.fsum(shares.values()) - math.fsum(least.values())
        return {name: least[name] + rest * self._demand[name] / total for name in shares}


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
