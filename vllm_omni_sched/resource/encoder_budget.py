"""Compute the encoder compute budget of a step and split it among modalities."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from vllm_omni_sched.resource.fair import max_min


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
