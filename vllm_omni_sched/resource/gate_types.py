"""What a stage's gate is told, what it asks, and what it answers."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from enum import Enum

from vllm_omni_sched.graph.order import WaitingRequest
from vllm_omni_sched.resource.balance import ReplicaState


class ReleaseReason(str, Enum):
    """Why a request is released now."""

    IDLE = "idle"  # a replica has nothing to do
    BATCH_FULL = "batch_full"  # it fills its replica, with those released along with it
    WINDOW_OVER = "window_over"  # the batching window of one is over, and the batch goes as it is
    LOW_SHARE = "low_share"  # the share of the low class
    OVERDUE = "overdue"  # passed over as often as may be


@dataclass(frozen=True)
class GateRequest:
    """A request that waits before the stage.

    ``waiting``: what its place in the order goes by, and its cost.
    ``low``: of the class that has only its share while others wait.
    ``units``: of long work; 0 for short work, which no limit of units holds back.
    ``needs``: which credits it takes to start; those with equal needs have them at the same moments. Of few values.

    Raises:
        ValueError: the units are negative.
    """

    waiting: WaitingRequest
    low: bool = False
    units: int = 0
    needs: Hashable = None

    def __post_init__(self) -> None:
        if self.units < 0:
            raise ValueError(f"request {self.request_id!r}: units must be 0 or more, got {self.units}")

    @property
    def request_id(self) -> str:
        """That of ``waiting``."""
        return self.waiting.request_id


class GateTerms:
    """What the gate asks its caller while it decides. As it is here: there are always credits, and nothing is warm."""

    def has_credits(self, needs: Hashable) -> bool:
        """Whether those with these needs may start, as far as the stages after this one go."""
        return True

    def take(self, request_id: str) -> bool:
        """It is about to be released: take its credits. False: it keeps its place, and its likes are not asked now."""
        return True

    def warm(self, request_id: str) -> Mapping[int, float]:
        """The part of its cache that each replica has, by replica id, where not 0."""
        return {}

    def distances(self, request_id: str) -> Mapping[int, float]:
        """Seconds that getting its input to each replica takes, by replica id, where not 0."""
        return {}

    def replica(self, replica_id: int) -> ReplicaState | None:
        """One that the gate was not given, of a stage whose replicas are drawn; None where it is to get nothing."""
        return None


@dataclass(frozen=True)
class Release:
    """A request may start, on that replica."""

    request_id: str
    replica_id: int
    reason: ReleaseReason


@dataclass(frozen=True)
class GatePlan:
    """What is released, in that order; and when to ask again if nothing happens."""

    releases: tuple[Release, ...] = ()
    wake_at: float | None = None
