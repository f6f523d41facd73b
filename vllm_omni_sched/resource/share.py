"""Whether the items that a request needs next are encoded in the step or beside it."""

from dataclasses import dataclass
from enum import Enum

from vllm_omni_sched.errors import ConfigError
from vllm_omni_sched.resource.lane_share import DecodeLoad


class Where(str, Enum):
    """Where items are encoded."""

    IN_STEP = "in_step"  # by this step, at full width, while decoding waits
    LANE = "lane"  # beside the steps


class WhereReason(str, Enum):
    """Why there; each is a label of ``encode_placements_total``."""

    NO_LANE = "no_lane"  # not counted: without a lane nothing is asked
    NO_DECODE = "no_decode"  # in the step: nobody is held up
    TOO_LONG = "too_long"  # in the lane: nobody is held up now, but somebody could arrive
    AGED = "aged"  # not counted: what is in the lane goes on, and nothing waits to be placed
    WOULD_NOT_BE_NOTICED = "would_not_be_noticed"  # in the step: ends within the ITL target
    DEADLINE = "deadline"  # not counted: no deadline is worth a stall of those who decode
    WOULD_STALL_DECODE = "would_stall_decode"  # in the lane
    LANE_FULL = "lane_full"  # not counted: the lane takes all that it is given, one after another


@dataclass(frozen=True)
class Placement:
    """Where the items go, and why."""

    where: Where
    reason: WhereReason


class EncodeShare:
    """Which items are encoded where. The first rule that fits decides:

    1. Nobody decodes: in the step, at full width, what ends within ``max_alone_seconds``. What takes longer goes to
       the lane, which is as quick while nobody decodes: who arrives in the middle of a step waits for its end.
    2. Their time fits into what the ITL target leaves of this step, which is nothing before an ITL was measured: in
       the step.
    3. Otherwise: in the lane.

    Raises:
        ConfigError: ``max_alone_seconds`` is negative or NaN.
    """

    def __init__(self, max_alone_seconds: float) -> None:
        if not max_alone_seconds >= 0:
            raise ConfigError(f"max_alone_seconds must be 0 or more, got {max_alone_seconds}")
        self.max_alone_seconds = max_alone_seconds

    def place(self, decoding: DecodeLoad | None, seconds: float) -> Placement:
        """Place items that together take so many seconds at full width. ``decoding``: None if nobody decodes."""
        if decoding is None:
            if seconds <= self.max_alone_seconds:
                return Placement(Where.IN_STEP, WhereReason.NO_DECODE)
            return Placement(Where.LANE, WhereReason.TOO_LONG)
        if decoding.itl_seconds is not None and seconds <= decoding.itl_target_seconds - decoding.itl_seconds:
            return Placement(Where.IN_STEP, WhereReason.WOULD_NOT_BE_NOTICED)
        return Placement(Where.LANE, WhereReason.WOULD_STALL_DECODE)
