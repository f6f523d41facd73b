"""Steer the encoder lane's share of the device by the inter-token latency of decoding requests."""

import math
from dataclasses import dataclass
from enum import Enum

from vllm_omni_sched.config.errors import ConfigError


class ShareReason(str, Enum):
    """Reason for the lane's share."""

    NO_DECODE = "no_decode"  # all of it: no request decodes
    NO_TARGET = "no_target"  # all of it: no decoding request has an ITL target
    NOT_MEASURED = "not_measured"  # held: no latency is known yet
    OVER_TARGET = "over_target"  # lowered
    UNDER_TARGET = "under_target"  # raised
    AT_MIN = "at_min"  # over target, cannot go lower
    AT_MAX = "at_max"  # under target, cannot go higher


@dataclass(frozen=True)
class DecodeLoad:
    """Those who decode now, under the tightest of their targets; ITL in seconds, None before it was measured.

    Raises:
        ValueError: the latency is negative or not finite, or the target is not above 0.
    """

    itl_target_seconds: float
    itl_seconds: float | None = None  # EWMA

    def __post_init__(self) -> None:
        if not self.itl_target_seconds > 0:
            raise ValueError(f"itl_target_seconds must be above 0, got {self.itl_target_seconds}")
        if self.itl_seconds is not None and not 0 <= self.itl_seconds < math.inf:
            raise ValueError(f"itl_seconds must be finite and >= 0, got {self.itl_seconds}")


class LaneShare:
    """A PI controller on the relative ITL error, (target - ITL) / target.

    1. Nobody decodes, or nobody has a target: the whole device. What was learnt is kept for when
       decoding goes on.
    2. While the ITL is over its target, the share falls at every update, by at least the integral's part.
    3. Otherwise it moves by proportional x change of the error + integral x error x seconds passed.
    4. It stays in ``[min_share, 1]``, so encoding is never starved. The integral is the share itself, so
       bounding it prevents windup.
    5. A pause between updates counts as at most one second, and the error as no less than -1.

    Raises:
        ConfigError: ``min_share`` is not in (0, 1], a gain is negative, or the integral one is 0.
    """

    def __init__(self, min_share: float = 0.1, proportional: float = 0.2, integral: float = 0.5) -> None:
        if not 0 < min_share <= 1:
            raise ConfigError(f"min_share must be in (0, 1], got {min_share}")
        if not (0 <= proportional < math.inf and 0 < integral < math.inf):
            raise ConfigError(f"proportional must be >= 0 and integral above 0, got {proportional} and {integral}")
        self.min_share = min_share
        self.proportional = proportional
        self.integral = integral
        self._share = 1.0
        self._error: float | None = None
        self._updated = -math.inf

    def update(self, decoding: DecodeLoad | None, now: float) -> tuple[float, ShareReason]:
        """The share from ``now`` on, and why. ``decoding``: None if nobody decodes."""
        passed = min(max(now - self._updated, 0.0), 1.0)
        self._updated = max(now, self._updated)
        if decoding is None or decoding.itl_target_seconds == math.inf:
            self._error = None
            return 1.0, ShareReason.NO_DECODE if decoding is None else ShareReason.NO_TARGET
        if decoding.itl_seconds is None:
            return self._share, ShareReason.NOT_MEASURED
        error = max(1 - decoding.itl_seconds / decoding.itl_target_seconds, -1.0)
        held = self.integral * error * passed
        change = held + self.proportional * (0.0 if self._error is None else error - self._error)
        if error < 0:
            change = min(change, held)
        self._error = error
        wanted = self._share + change
        self._share = min(max(wanted, self.min_share), 1.0)
        if error < 0:
            return self._share, ShareReason.AT_MIN if wanted <= self.min_share else ShareReason.OVER_TARGET
        return self._share, ShareReason.AT_MAX if wanted >= 1 else ShareReason.UNDER_TARGET
