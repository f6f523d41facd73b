"""Compute the encoder compute budget of a step and split it among modalities."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


def max_min(capacity: int, demands: Sequence[int]) -> list[int]:
    """Split ``capacity`` so that nobody's share can grow without taking from somebody with less.

    1. Nobody gets more than it demands; what it leaves goes to the others, in equal parts.
    2. The shares add up to the smaller of the capacity and all demands together.
    3. Shares are whole numbers: each may differ from the exact one by as many units as there are demands.

    Progressive filling: Bertsekas and Gallager, "Data Networks", 6.5.2.

    Raises:
        ValueError: the capacity or a demand is negative.
    """
    if capacity < 0 or min(demands, default=0) < 0:
        raise ValueError(f"capacity and demands must be 0 or more, got {capacity} and {list(demands)}")
    shares = [0] * len(demands)
    # Who is satisfied first comes first: the rest is then split anew among those behind.
    for before, i in enumerate(sorted(range(len(demands)), key=demands.__getitem__)):
        shares[i] = min(demands[i], capacity // (len(demands) - before))
        capacity -= shares[i]
    return shares


LOOK_AHEAD = 16
"""Waiting requests that a plan takes into account; a step seldom starts more."""

MIN_PIECE = 64
"""Tokens from which on a piece is worth its place in a step."""


def longest_piece(remaining: Sequence[int], budget: int) -> int:
    """Return the most tokens that one request gets in a step, so that the others get theirs.

    1. As many requests take part, in order, as can each have `MIN_PIECE`, or all that remains of them if that is less.
       One takes part in any case.
    2. The budget is split among these max-min fairly: short requests go whole, long ones share the rest.
    3. What is left over goes to the next in order, as a small piece: no budget is wasted.

    Args:
        remaining: tokens that each request still wants, in the waiting order; one or more.
        budget: tokens of the step, 1 or more.
    """
    chosen, needed = 0, 0
    for tokens in remaining:
        needed += min(tokens, MIN_PIECE)
        if chosen and needed > budget:
            break
        chosen += 1
    shares = max_min(budget, remaining[:chosen])
    following = remaining[chosen] if chosen < len(remaining) else 0
    return max(*shares, min(budget - sum(shares), following))


class BudgetReason(str, Enum):
    """Reason for the size of the budget."""

    WANTED = "wanted"  # as requested
    PROFILED = "profiled"  # more was requested than the device was profiled for
    LARGEST_ITEM = "largest_item"  # less was requested than one waiting item needs


class ModalityReason(str, Enum):
    """Reason for a modality's share."""

    ALL = "all"  # all of its waiting items fit
    FAIR = "fair"  # its fair share
    OLDEST_ITEM = "oldest_item"  # raised to what the longest-waiting item needs


@dataclass(frozen=True)
class ModalityDemand:
    """Waiting items of one modality, in encoder embeddings (``num_encoder_embeds``).

    ``head_embeds``: the size of its item that is next; ``waiting_since``: since when that item waits, by any clock
    that all modalities share.

    Raises:
        ValueError: not ``1 <= head_embeds <= largest_embeds <= total_embeds``.
    """

    modality: str
    total_embeds: int
    largest_embeds: int
    head_embeds: int
    waiting_since: float

    def __post_init__(self) -> None:
        if not 1 <= self.head_embeds <= self.largest_embeds <= self.total_embeds:
            raise ValueError(
                f"{self.modality}: need 1 <= head_embeds <= largest_embeds <= total_embeds, got "
                f"{self.head_embeds}, {self.largest_embeds}, {self.total_embeds}"
            )


@dataclass(frozen=True)
class ModalityShare:
    """A modality's part of the budget, in embeddings, and the reason."""

    modality: str
    embeds: int
    reason: ModalityReason


@dataclass(frozen=True)
class EncoderBudgetPlan:
    """``encoder_compute_budget`` of one step, in embeddings, and its parts."""

    embeds: int
    reason: BudgetReason
    shares: tuple[ModalityShare, ...]


class EncoderBudget:
    """Decides how many embeddings a step may encode, and of which modality.

    1. The budget is what is wanted, but never more than ``profiled_embeds`` and never less than the
       largest waiting item: an item is encoded whole or not at all, so it would be stuck.
    2. It is split max-min fairly: what a modality does not need goes to the others.
    3. The longest-waiting next item of all modalities always fits into its modality's part; what
       it needs beyond rule 2 is taken from the others, again max-min fairly. So every modality makes progress.
    4. The parts add up to the smaller of the budget and all waiting items.

    Raises:
        ValueError: ``profiled_embeds`` is below 1.
    """

    def __init__(self, profiled_embeds: int) -> None:
        if profiled_embeds < 1:
            raise ValueError(f"profiled_embeds must be 1 or more, got {profiled_embeds}")
        self.profiled_embeds = profiled_embeds

    def plan(self, wanted_embeds: int, demands: Sequence[ModalityDemand]) -> EncoderBudgetPlan:
        """Return the budget of one step and its split.

        Raises:
            ValueError: an item is larger than ``profiled_embeds``: no budget could serve it.
        """
        largest = max((demand.largest_embeds for demand in demands), default=0)
        if largest > self.profiled_embeds:
            raise ValueError(
                f"a waiting item has {largest} embeddings, more than profiled_embeds = {self.profiled_embeds}; "
                "refuse it on arrival or profile with a larger budget"
            )
        embeds = min(max(wanted_embeds, largest, 0), self.profiled_embeds)
        if wanted_embeds > self.profiled_embeds:
            reason = BudgetReason.PROFILED
        else:
            reason = BudgetReason.LARGEST_ITEM if wanted_embeds < embeds else BudgetReason.WANTED
        return EncoderBudgetPlan(embeds, reason, self._split(embeds, demands))

    @staticmethod
    def _split(embeds: int, demands: Sequence[ModalityDemand]) -> tuple[ModalityShare, ...]:
        if not demands:
            return ()
        totals = [d.total_embeds for d in demands]
        parts = max_min(embeds, totals)
        oldest = min(range(len(demands)), key=lambda i: (demands[i].waiting_since, i))
        head = demands[oldest].head_embeds
        raised = parts[oldest] < head
        if raised:
            others = [i for i in range(len(demands)) if i != oldest]
            rest = max_min(embeds - head, [totals[i] for i in others])
            parts = [head if i == oldest else rest[others.index(i)] for i in range(len(demands))]
        shares = []
        for i, demand in enumerate(demands):
            reason = ModalityReason.ALL if parts[i] == demand.total_embeds else ModalityReason.FAIR
            if raised and i == oldest:
                reason = ModalityReason.OLDEST_ITEM
            shares.append(ModalityShare(demand.modality, parts[i], reason))
        return tuple(shares)
