"""Steer the encoder lane's share of the device by the inter-token latency of decoding requests."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from vllm_omni_sched.errors import ConfigError


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
    """Decoding requests of one SLA class; ITL in seconds, None before it was measured.

    Raises:
        ValueError: a latency is negative or NaN, or the target is not above 0.
    """

    sla: str
    num_decoding: int
    itl_target_seconds: float
    itl_seconds: float | None = None  # EWMA
    itl_p99_seconds: float | None = None

    def __post_init__(self) -> None:
        if not self.itl_target_seconds > 0:
            raise ValueError(f"class {self.sla!r}: itl_target_seconds must be above 0, got {self.itl_target_seconds}")
        for name in ("itl_seconds", "itl_p99_seconds"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"class {self.sla!r}: {name} must be finite and >= 0, got {value}")


class LaneShare:
    """A PI controller on the relative ITL error, (target - ITL) / target, of the class with the largest violation.

    1. While no request decodes, or none has a target, the lane gets the whole device. The controller's state is
       kept for when decoding goes on.
    2. While any class is over its target, the share falls at every update, by at least the integral's part.
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

    def update(self, decoding: Sequence[DecodeLoad], now: float) -> tuple[float, ShareReason]:
        """Return the share from ``now`` on, and the reason."""
        decoding = [load for load in decoding if load.num_decoding]
        passed = min(max(now - self._updated, 0.0), 1.0)
        self._updated = max(now, self._updated)
        bound = [load for load in decoding if load.itl_target_seconds < math.inf]
        if not bound:
            self._error = None
            return 1.0, ShareReason.NO_TARGET if decoding else ShareReason.NO_DECODE
        errors = [1 - d.itl_seconds / d.itl_target_seconds for d in bound if d.itl_seconds is not None]
        if not errors:
            return self._share, ShareReason.NOT_MEASURED
        error = max(min(errors), -1.0)
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
