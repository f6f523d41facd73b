"""Events that recovery receives, and actions that it returns."""

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias


@dataclass(frozen=True, order=True)
class Replica:
    """A replica of a stage."""

    stage: int
    index: int


class FailReason(str, Enum):
    """Reason for failing a request."""

    POISON = "poison"  # in flight at too many deaths in a row: it may be the cause
    REDISPATCHES = "redispatches"  # moved to other replicas too often
    WAITED = "waited"  # no replica came back in time
    NO_REPLICA = "no_replica"  # no replica is left, and none is being restarted
    COMPANIONS = "companions"  # parts of the same request cannot run again
    SESSION = "session"  # its state was in the replica that died
    STALLED = "stalled"  # it made no progress for longer than the last-resort deadline


class IncidentKind(str, Enum):
    """Kind of an incident of a replica."""

    SUSPECTED = "suspected"
    CLEARED = "cleared"
    DIED = "died"
    RESTARTING = "restarting"
    RESTART_FAILED = "restart_failed"
    BACK = "back"
    GIVEN_UP = "given_up"  # the circuit breaker is open: too many recent restarts
    DRAINING = "draining"  # it gets no new work, since it is to be moved
    STAYED = "stayed"  # it was not moved after all
    MOVED_AWAY = "moved_away"  # stopped while empty, so that its place can be used otherwise
    MOVED_IN = "moved_in"  # started in a free place
    MOVE_FAILED = "move_failed"  # the replica that was to take its place did not start


@dataclass(frozen=True)
class Dispatched:
    """Event: the orchestrator gave a request to a replica, for the first time or as its next stage.

    ``whole``: common id of a request that is in several stages at a time, with a request_id in each.
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
    """Event: the client aborted a request."""

    request_id: str


@dataclass(frozen=True)
class Unsent:
    """A request was dispatched to a replica that died before it was sent there; it waits in its stage again."""

    request_id: str


@dataclass(frozen=True)
class OutputLost:
    """The output of a finished stage for a request is no longer held."""

    request_id: str
    stage: int


@dataclass(frozen=True)
class Recalled:
    """A request was withdrawn from a live replica, since its input was lost with the replica that should send it."""

    request_id: str


@dataclass(frozen=True)
class ReplicaEvent:
    """An event of a replica."""

    replica: Replica


@dataclass(frozen=True)
class CausedEvent(ReplicaEvent):
    """An event of a replica with a known cause."""

    cause: str = ""


class Suspected(CausedEvent):
    """A replica does not answer."""


class Cleared(ReplicaEvent):
    """A suspected replica answers after all."""


class Died(CausedEvent):
    """A replica is dead, or is to be treated as dead."""


class Restarted(ReplicaEvent):
    """A restarted replica can take requests again."""


class RestartFailed(CausedEvent):
    """Event: a restarted replica did not start; an unknown one is watched from then on, as a dead one."""


class Draining(ReplicaEvent):
    """A replica is to be stopped when it is empty: no request is moved there any more."""


class Stays(CausedEvent):
    """A draining replica is not to be stopped after all."""


class Left(CausedEvent):
    """A replica was stopped on purpose while empty, which is not a death."""


@dataclass(frozen=True)
class Joined(CausedEvent):
    """A new replica, or one that had left, can take requests. ``away``: another host starts it, and starts it again."""

    away: bool = False


@dataclass(frozen=True)
class Tick:
    """Time has passed; expected at `Recovery.next_wake`."""


Event: TypeAlias = (
    Dispatched
    | Finished
    | Aborted
    | Unsent
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
    """An incident of a replica, and the number of requests affected."""

    at: float
    replica: Replica
    kind: IncidentKind
    cause: str = ""
    requests: int = 0


@dataclass(frozen=True)
class Restart:
    """Restart the replica now, after ending what is left of it."""

    replica: Replica


@dataclass(frozen=True)
class Redispatch:
    """Give a request to a replica. ``stages``: all stages that have to run for it, in order, the replica's first."""

    request_id: str
    replica: Replica
    attempt: int
    stages: tuple[int, ...]


@dataclass(frozen=True)
class Wait:
    """Keep a request, which is dispatched or failed by ``until``."""

    request_id: str
    until: float


@dataclass(frozen=True)
class Fail:
    """Answer a request with an error."""

    request_id: str
    reason: FailReason


@dataclass(frozen=True)
class Deliver:
    """Deliver an answer that counts, to the next stage or to the client."""

    request_id: str


@dataclass(frozen=True)
class Drop:
    """Drop an answer to an outdated dispatch, or for a request that is gone."""

    request_id: str


@dataclass(frozen=True)
class Record:
    """Log and count an incident."""

    incident: Incident


Action: TypeAlias = Restart | Redispatch | Wait | Fail | Deliver | Drop | Record
