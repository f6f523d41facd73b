"""Move shares slowly towards a demand, and ignore fluctuations."""

import math
from collections.abc import Mapping
from enum import Enum

from vllm_omni_sched.errors import ConfigError


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
