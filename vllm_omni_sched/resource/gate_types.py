"""Types of a stage's gate: its input, its questions to the caller, and its answer."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from enum import Enum

from vllm_omni_sched.graph.order import WaitingRequest
from vllm_omni_sched.resource.balance import ReplicaState


class ReleaseReason(str, Enum):
    """Reason why a request is released now."""

    IDLE = "idle"  # a replica is idle
    ALONE = "alone"  # it shares no batch with others, so it need not wait for any
    BATCH_FULL = "batch_full"  # it fills its replica, together with others released now
    WINDOW_OVER = "window_over"  # the batching window is over, and the batch goes as it is
    LOW_SHARE = "low_share"  # the share of the low class
    OVERDUE = "overdue"  # passed over as often as allowed


class HoldReason(str, Enum):
    """Reason why a request is held."""

    NO_ROOM = "no_room"  # no healthy replica has room in its batch
    NO_CREDITS = "no_credits"  # a later stage has no room for it
    UNITS = "units"  # it is long, and as much long work runs already as allowed
    WINDOW = "window"  # until more requests arrive or its batching window is over
    BEHIND_OVERDUE = "behind_overdue"  # a request that was passed over too often, and has no credits yet, goes first


@dataclass(frozen=True)
class GateRequest:
    """A request that waits before the stage.

    ``waiting``: the data for its place in the order, and its cost.
    ``mergeable``: it may run in one batch with others; a request that may not is never held for them.
    ``low``: it belongs to the class that gets only its share while others wait.
    ``units``: units of long work; 0 for short work, which no limit of units holds back.
    ``needs``: the credits that it takes to start; requests with equal needs get them at the same moments. Few values.

    Raises:
        ValueError: the units are negative.
    """

    waiting: WaitingRequest
    mergeable: bool = True
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
