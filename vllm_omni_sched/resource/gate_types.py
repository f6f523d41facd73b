"""Types of a stage's gate: its input, its questions to the caller, and its answer."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from enum import Enum

from vllm_omni_sched.graph.order import WaitingRequest
from vllm_omni_sched.resource.balance import ReplicaState


class ReleaseReason(str, Enum):
    """Reason why a request is released now."""

    IDLE = "idle"  # a replica has nothing to do
    BATCH_FULL = "batch_full"  # it fills its replica, with those released along with it
    WINDOW_OVER = "window_over"  # the batching window of one is over, and the batch goes as it is
    LOW_SHARE = "low_share"  # the share of the low class
    OVERDUE = "overdue"  # passed over as often as allowed


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
        """Return the id of ``waiting``."""
        return self.waiting.request_id


class GateTerms:
    """Questions of the gate to its caller. The defaults always grant credits and report no cache or distance."""

    def has_credits(self, needs: Hashable) -> bool:
        """Return whether requests with these needs may start, as far as later stages allow."""
        return True

    def take(self, request_id: str) -> bool:
        """Take the credits of a request to be released; if False, requests with equal needs are skipped this round."""
        return True

    def warm(self, request_id: str) -> Mapping[int, float]:
        """Return the fraction of the request in each replica's cache, by replica id, where not 0."""
        return {}

    def distances(self, request_id: str) -> Mapping[int, float]:
        """Return the seconds that its input takes to each replica, by replica id, where not 0."""
        return {}

    def replica(self, replica_id: int) -> ReplicaState | None:
        """Describe a replica that was not drawn for this decision; None if it should get no request."""
        return None


@dataclass(frozen=True)
class Release:
    """Release of a request to a replica, with the reason."""

    request_id: str
    replica_id: int
    reason: ReleaseReason


@dataclass(frozen=True)
class GatePlan:
    """The releases in order, and the time to ask again if nothing happens."""

    releases: tuple[Release, ...] = ()
    wake_at: float | None = None
