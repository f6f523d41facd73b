"""Progressive batching: long requests go in pieces, so that one does not fill a step alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from vllm_omni_sched.errors import ConfigError
from vllm_omni_sched.resource.fair import max_min


class PieceReason(str, Enum):
    """Why a piece has its size."""

    WHOLE = "whole"  # all that remained
    SHARED = "shared"  # cut, because others wait as well
    BUDGET = "budget"  # cut by the step's budget alone
    OVERDUE = "overdue"  # left out `max_skips` times, so it came first; cut as above
    NO_ROOM = "no_room"  # nothing this step


LOOK_AHEAD = 16
"""Waiting requests that a plan takes into account; a step seldom starts more."""


@dataclass(frozen=True)
class Work:
    """What remains of one request, in tokens or in items.

    ``skipped``: for how many steps in a row it got nothing.

    Raises:
        ValueError: nothing remains, or ``skipped`` is negative.
    """

    request_id: str
    remaining: int
    skipped: int = 0

    def __post_init__(self) -> None:
        if self.remaining < 1:
            raise ValueError(f"request {self.request_id!r}: remaining must be 1 or more, got {self.remaining}")
        if self.skipped < 0:
            raise ValueError(f"request {self.request_id!r}: skipped must be 0 or more, got {self.skipped}")


@dataclass(frozen=True)
class Piece:
    """How much of a request goes in this step, and why; 0 only with `PieceReason.NO_ROOM`."""

    request_id: str
    amount: int
    reason: PieceReason


class Pieces:
    """Cuts the step's budget into pieces; one object for tokens, another for items.

    1. Requests come in the waiting order, those skipped ``max_skips`` steps in a row before all
       others, the longest-skipped first.
    2. As many take part as can each have ``min_piece``, or all that remains of them if that is less.
       One takes part whenever there is budget at all.
    3. The budget is split among these max-min fairly: short requests go whole, long ones share the rest.
    4. What is left over goes to the next in order, as a small piece: no budget is wasted.

    Hence the pieces add up to the smaller of the budget and all that remains; and with a budget of 1 or more
    in every step, a request gets a piece within ``max_skips`` steps and one for each request waiting with it.

    Raises:
        ConfigError: ``min_piece`` or ``max_skips`` is below 1.
    """

    def __init__(self, min_piece: int = 64, max_skips: int = 8) -> None:
        for name, value in (("min_piece", min_piece), ("max_skips", max_skips)):
            if value < 1:
                raise ConfigError(f"{name} must be 1 or more, got {value}")
        self.min_piece = min_piece
        self.max_skips = max_skips

    def plan(self, works: Sequence[Work], budget: int) -> tuple[Piece, ...]:
        """One piece for each of ``works``, in their order.

        Raises:
            ValueError: the budget is negative.
        """
        if budget < 0:
            raise ValueError(f"budget must be 0 or more, got {budget}")
        order = sorted(range(len(works)), key=lambda i: self._urgency(works[i]))
        chosen, needed = 0, 0
        for i in order:
            needed += min(works[i].remaining, self.min_piece)
            if budget == 0 or (chosen and needed > budget):
                break
            chosen += 1
        shares = max_min(budget, [works[i].remaining for i in order[:chosen]])
        amounts = dict(zip(order, shares, strict=False))
        left = budget - sum(shares)
        if left and chosen < len(order):
            amounts[order[chosen]] = min(left, works[order[chosen]].remaining)
        alone = len(amounts) == 1
        return tuple(self._piece(work, amounts.get(i, 0), alone) for i, work in enumerate(works))

    def _urgency(self, work: Work) -> int:
        return -work.skipped if work.skipped >= self.max_skips else 0

    def _piece(self, work: Work, amount: int, alone: bool) -> Piece:
        if amount == 0:
            reason = PieceReason.NO_ROOM
        elif amount == work.remaining:
            reason = PieceReason.WHOLE
        elif work.skipped >= self.max_skips:
            reason = PieceReason.OVERDUE
        else:
            reason = PieceReason.BUDGET if alone else PieceReason.SHARED
        return Piece(work.request_id, amount, reason)
