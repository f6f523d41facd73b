"""What recovery is told, and what it asks for."""

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias


@dataclass(frozen=True, order=True)
class Replica:
    """One copy of a stage."""

    stage: int
    index: int


class FailReason(str, Enum):
    """Why a request is given up."""

    POISON = "poison"  # in flight at so many deaths in a row: it may be what kills
    REDISPATCHES = "redispatches"  # moved too often
    WAITED = "waited"  # no replica came back in time
    NO_REPLICA = "no_replica"  # none is left, and none is restarted any more
    COMPANIONS = "companions"  # requests that belong together by their names cannot run again
    SESSION = "session"  # its state was in the replica that died
    STALLED = "stalled"  # it made no progress for longer than the last-resort deadline


class IncidentKind(str, Enum):
    """What happened to a replica."""

    SUSPECTED = "suspected"
    CLEARED = "cleared"
    DIED = "died"
    RESTARTING = "restarting"
    RESTART_FAILED = "restart_failed"
    BACK = "back"
    GIVEN_UP = "given_up"  # the circuit is open: too many restarts of late
    DRAINING = "draining"  # it gets no new work, since it is to be moved
    STAYED = "stayed"  # it was not moved after all
    MOVED_AWAY = "moved_away"  # stopped, empty, for its place to be used otherwise
    MOVED_IN = "moved_in"  # started in a place that was free
    MOVE_FAILED = "move_failed"  # what was to be in its place did not start


@dataclass(frozen=True)
class Dispatched:
    """The orchestrator gave a request to a replica, for the first time or as its next stage.

    ``whole``: one that is in several stages at a time has a request_id in each; what they have in common.
    """

    request_id: str
    replica: Replica
    whole: str = ""


@dataclass(frozen=True)
class Finished:
    """A replica answered; ``attempt``: which dispatch of the request it answers; ``final``: the request is done."""

    request_id: str
    attempt: int
    final: bool = False


@dataclass(frozen=True)
class Aborted:
    """Its client took a request back."""

    request_id: str


@dataclass(frozen=True)
class OutputLost:
    """What a finished stage put out for a request is held no longer."""

    request_id: str
    stage: int


@dataclass(frozen=True)
class Recalled:
    """A request was taken back from a replica that lives, since its input was lost with the one that should send it."""

    request_id: str


@dataclass(frozen=True)
class ReplicaEvent:
    """Something has happened to a replica."""

    replica: Replica


@dataclass(frozen=True)
class CausedEvent(ReplicaEvent):
    """And it is known why."""

    cause: str = ""


class Suspected(CausedEvent):
    """A replica does not answer."""


class Cleared(ReplicaEvent):
    """It answers after all."""


class Died(CausedEvent):
    """It is gone, or is to be taken for gone."""


class Restarted(ReplicaEvent):
    """It can take requests again."""


class RestartFailed(CausedEvent):
    """It did not come up."""


class Draining(ReplicaEvent):
    """It is to be stopped when it is empty: no request is moved there any more."""


class Stays(CausedEvent):
    """It is not to be stopped after all."""


class Left(CausedEvent):
    """It was stopped on purpose, empty: that is no death."""


class Joined(CausedEvent):
    """One that was not there before, or had left, can take requests."""


@dataclass(frozen=True)
class Tick:
    """Time passed; wanted at `Recovery.next_wake`."""


Event: TypeAlias = (
    Dispatched
    | Finished
    | Aborted
    | OutputLost
    | Recalled
    | Suspected
    | Cleared
    | Died
    | Restarted
    | RestartFailed
    | Draining
    | Stays
    | Left
    | Joined
    | Tick
)


@dataclass(frozen=True)
class Incident:
    """What happened to a replica, and to how many requests."""

    at: float
    replica: Replica
    kind: IncidentKind
    cause: str = ""
    requests: int = 0


@dataclass(frozen=True)
class Restart:
    """Start the replica anew, now; end what is left of it first."""

    replica: Replica


@dataclass(frozen=True)
class Redispatch:
    """Give a request to a replica. ``stages``: all that has to run for it, in order, the replica's first."""

    request_id: str
    replica: Replica
    attempt: int
    stages: tuple[int, ...]


@dataclass(frozen=True)
class Wait:
    """Keep a request; it is given to a replica or given up by ``until``."""

    request_id: str
    until: float


@dataclass(frozen=True)
class Fail:
    """Answer a request with an error."""

    request_id: str
    reason: FailReason


@dataclass(frozen=True)
class Deliver:
    """The answer counts: pass it on, to the next stage or to the client."""

    request_id: str


@dataclass(frozen=True)
class Drop:
    """The answer is of a dispatch that counts no longer, or of a request that is gone."""

    request_id: str


@dataclass(frozen=True)
class Record:
    """Log and count an incident."""

    incident: Incident


Action: TypeAlias = Restart | Redispatch | Wait | Fail | Deliver | Drop | Record
