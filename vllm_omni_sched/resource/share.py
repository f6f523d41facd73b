"""Decide whether the items that a request needs next are encoded in the step or beside it."""

from dataclasses import dataclass
from enum import Enum

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.resource.lane_share import DecodeLoad


class Where(str, Enum):
    """Where items are encoded."""

    IN_STEP = "in_step"  # by this step, at full width, while decoding waits
    LANE = "lane"  # beside the steps


class WhereReason(str, Enum):
    """Reason for the place; each is a label of ``encode_placements_total``."""

    NO_DECODE = "no_decode"  # in the step: no other request is held up
    TOO_LONG = "too_long"  # in the lane: no request is held up now, but one could arrive
    WOULD_NOT_BE_NOTICED = "would_not_be_noticed"  # in the step: ends within the ITL target
    WOULD_STALL_DECODE = "would_stall_decode"  # in the lane

    @property
    def where(self) -> Where:
        """Return the place that this is a reason for."""
        in_step = self in (WhereReason.NO_DECODE, WhereReason.WOULD_NOT_BE_NOTICED)
        return Where.IN_STEP if in_step else Where.LANE


@dataclass(frozen=True)
class Placement:
    """Where the items go, and why."""

    where: Where
    reason: WhereReason


class EncodeShare:
    """Decides which items are encoded where. The first rule that fits decides:

    1. No request decodes: in the step, at full width, what ends within ``max_alone_seconds``. What takes longer goes to
       the lane, which is as quick while no request decodes: one that arrives in the middle of a step waits for its end.
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
        """Place items that together take so many seconds at full width.

        ``decoding``: None if no other request could be held up.
        """
        if decoding is None:
            reason = WhereReason.NO_DECODE if seconds <= self.max_alone_seconds else WhereReason.TOO_LONG
        elif decoding.itl_seconds is not None and seconds <= decoding.itl_target_seconds - decoding.itl_seconds:
            reason = WhereReason.WOULD_NOT_BE_NOTICED
        else:
            reason = WhereReason.WOULD_STALL_DECODE
        return _PLACEMENTS[reason]


_PLACEMENTS = {reason: Placement(reason.where, reason) for reason in WhereReason}
