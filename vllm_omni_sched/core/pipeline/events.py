"""Events that drivers pass to the pipeline core, and actions that they get from it."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_omni_sched.core.pipeline.requests import PipelineRequest, StageWork
from vllm_omni_sched.monitor.anomaly.finding import Anomaly, AnomalyKind
from vllm_omni_sched.monitor.recovery.events import FailReason, Incident
from vllm_omni_sched.monitor.recovery.remedies import RemedyAction, ReplaceOutcome
from vllm_omni_sched.resource.pipeline.stage_cost import Features
from vllm_omni_sched.resource.pipeline.stage_gate import ReleaseReason

# ---- events of requests in the pipeline


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request has come to the pipeline, with its features where they are known."""

    request: PipelineRequest


@dataclass(frozen=True, slots=True)
class Left:
    """A request has left the pipeline: answered, failed or aborted."""

    request_id: str


# ---- events of requests in a stage


@dataclass(frozen=True, slots=True)
class Submitted:
    """A request has come to a stage. The answer is `Follow`, or `Lead`: then `Waits` is to come."""

    work: StageWork
    features: Features


@dataclass(frozen=True, slots=True)
class Waits:
    """Work waits for a replica; the answer is what can start now."""

    work: StageWork


@dataclass(frozen=True, slots=True)
class Placed:
    """The driver has chosen a replica for work itself; it starts there, whatever waits."""

    work: StageWork
    replica_id: int


@dataclass(frozen=True, slots=True)
class Held:
    """A request must not start in the stage until `Resumed`: its input is not there yet."""

    stage_id: int
    request_id: str


@dataclass(frozen=True, slots=True)
class Resumed:
    """A request that was held may start; others are ignored."""

    stage_id: int
    request_id: str


@dataclass(frozen=True, slots=True)
class TakenOut:
    """Work that waits is to wait no longer; it may come again."""

    stage_id: int
    request_id: str


@dataclass(frozen=True, slots=True)
class FirstOutput:
    """Running work has put out something for the first time, ``seconds`` after it began; later ones are ignored."""

    stage_id: int
    request_id: str
    seconds: float | None = None  # as many as have passed


@dataclass(frozen=True, slots=True)
class Finished:
    """Work has ended; ``ok``: with a result."""

    stage_id: int
    request_id: str
    ok: bool = True


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """Running work was stopped, and is to run again with its followers."""

    stage_id: int
    request_id: str


@dataclass(frozen=True, slots=True)
class Detached:
    """A request needs the work of a stage no longer: it was aborted, has failed, or has left. Others may need it.

    The answer is `Inherited` if another request takes its place in the queue, `Continued` if running work goes on for
    others, or `Stop` for running work that was begun for a request that had left before, and that nobody needs now.
    """

    stage_id: int
    request_id: str


@dataclass(frozen=True, slots=True)
class InputsLost:
    """Outputs of earlier stages for a request in this stage are no longer held.

    ``sources``: the sources of the stage whose outputs are lost, with all that these were made of; None: all of them.
    """

    stage_id: int
    request_id: str
    sources: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Recalled:
    """Work was withdrawn, because the replica of the previous stage died before it had sent the input.

    ``work``: withdrawn or taken out before. ``stage_id``: where it was. ``replica_id``: which replica should have sent.
    ``sources``: the sources of the stage whose outputs are lost, that of the replica first; None: the stage before.
    """

    work: StageWork
    stage_id: int
    replica_id: int
    sources: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Undelivered:
    """The output of work that has ended was lost with its replica before all of it was sent."""

    stage_id: int
    request_id: str
    replica_id: int


@dataclass(frozen=True, slots=True)
class CannotRunAgain:
    """Work that was lost cannot run again, for a reason that the driver knows; the answer is `GivenUp`."""

    stage_id: int
    request_id: str
    reason: FailReason


@dataclass(frozen=True, slots=True)
class StageFailed:
    """A stage cannot do its work for a request; the answer is `Fails`."""

    stage_id: int
    request_id: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """A request is gone from a stage; work that was begun for it goes on only if others need it."""

    stage_id: int
    request_id: str


@dataclass(frozen=True, slots=True)
class Regrouped:
    """Work that has ended in a stage is to run again, for all receivers of its output."""

    stage_id: int
    request_id: str
    receivers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Renamed:
    """The work that was begun for a request runs no longer: its present leader will run under its own name."""

    stage_id: int
    request_id: str


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that does not wait in the queue needs a replica; the answer is `Chosen`."""

    stage_id: int
    request_id: str


# ---- events of replicas


@dataclass(frozen=True, slots=True)
class ReplicaUp:
    """A replica is new or was restarted, and can work.

    ``host``: the address of the host that started it; "": the one of the front end.
    """

    stage_id: int
    replica_id: int
    cause: str = ""
    host: str = ""


@dataclass(frozen=True, slots=True)
class PayloadsMeasured:
    """Messages of an edge were sent, with so many bytes together."""

    from_stage: int
    to_stage: int
    messages: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ReplicaStarting:
    """A new replica is being started; or it no longer is, because it is up or did not start."""

    stage_id: int
    on: bool = True


@dataclass(frozen=True, slots=True)
class ReplicaDown:
    """A replica takes no requests any more. What it had is lost with `ReplicaDied`, or drained before."""

    stage_id: int
    replica_id: int


@dataclass(frozen=True, slots=True)
class ReplicaDied:
    """A replica is dead, with its caches and its requests; the answer is `Lost` for each of these.

    With recovery, the driver then finds out what else is lost, and reports `DeathExamined`.
    """

    stage_id: int
    replica_id: int
    cause: str = ""


@dataclass(frozen=True, slots=True)
class DeathExamined:
    """All that was lost with a dead replica has been reported: recovery decides on the replica and its requests."""

    stage_id: int
    replica_id: int
    cause: str = ""


@dataclass(frozen=True, slots=True)
class RestartFailed:
    """A replica that was to be restarted did not start."""

    stage_id: int
    replica_id: int
    cause: str = ""


@dataclass(frozen=True, slots=True)
class ReplicaGone:
    """A replica was stopped on purpose, without requests."""

    stage_id: int
    replica_id: int
    cause: str = ""


@dataclass(frozen=True, slots=True)
class ReplicaDraining:
    """A replica is being drained: only work that was prepared for it may start there; or it no longer is."""

    stage_id: int
    replica_id: int
    on: bool = True
    cause: str = ""


@dataclass(frozen=True, slots=True)
class ReplicaSuspected:
    """A replica seems to hang and gets nothing; or it answers again."""

    stage_id: int
    replica_id: int
    on: bool = True
    cause: str = ""


@dataclass(frozen=True, slots=True)
class AnomalyFound:
    """An anomaly of a replica has begun that the core cannot see: a leak, or a sick edge."""

    stage_id: int
    replica_id: int
    kind: AnomalyKind


@dataclass(frozen=True, slots=True)
class ReplaceEnded:
    """A replacement that the core has asked for (`Remedy`) is over, or could not begin."""

    stage_id: int
    replica_id: int
    outcome: ReplaceOutcome


# ---- other events


@dataclass(frozen=True, slots=True)
class MemoryMeasured:
    """So much of the host's memory is in use, as a fraction."""

    used: float


@dataclass(frozen=True, slots=True)
class Check:
    """Time has passed: look for anomalies, once per interval."""


@dataclass(frozen=True, slots=True)
class Woken:
    """The time of a `Wake` has come; an outdated one is ignored."""

    stage_id: int | None
    at: float


@dataclass(frozen=True, slots=True)
class Tick:
    """Something may have changed: start what can start now in this stage, or in all, the last one first.

    The last stages go first, since requests that are nearly done make room.
    """

    stage_id: int | None = None


# ---- actions


@dataclass(frozen=True, slots=True)
class Start:
    """Send the work to its replica. ``warm``: whether the replica has data of the request in its caches."""

    work: StageWork
    reason: ReleaseReason | None = None  # None: recovery or the driver placed it, or it was prepared for the replica
    warm: bool | None = None  # None: unknown


@dataclass(frozen=True, slots=True)
class Follow:
    """Another request's work in this stage is this one's too."""

    work: StageWork
    leader: str


@dataclass(frozen=True, slots=True)
class Lead:
    """The request has to do its own work in the stage. ``again``: it leads already, and comes again after a death."""

    work: StageWork
    again: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    """Work is over. ``receivers``: the requests that get its output, the leader first."""

    work: StageWork
    receivers: tuple[str, ...]
    ok: bool


@dataclass(frozen=True, slots=True)
class Proceeds:
    """A request goes on to these stages: all their inputs are there. ``stage_id``: which has ended; None: it begins."""

    request_id: str
    stage_id: int | None
    starts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fails:
    """A request fails in a stage.

    ``outputs``: those that it asked for and that do not come. ``stages``: which are to be stopped for it. ``whole``:
    all of it fails; otherwise only these outputs. ``over``: no other output is to come.
    """

    request_id: str
    stage_id: int
    outputs: tuple[int, ...]
    stages: tuple[int, ...]
    whole: bool
    over: bool


@dataclass(frozen=True, slots=True)
class Gone:
    """Running work is over without a result, since its request has left."""

    work: StageWork


@dataclass(frozen=True, slots=True)
class Inherited:
    """The heir, which followed, waits in the place of the request ``owner`` that has left."""

    owner: str
    heir: StageWork


@dataclass(frozen=True, slots=True)
class Continued:
    """Work begun for a request that has left goes on for ``heir``."""

    stage_id: int
    request_id: str
    heir: StageWork | None


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop this work on its replica: no request needs it any more."""

    work: StageWork


@dataclass(frozen=True, slots=True)
class Lost:
    """Work that was on a replica is not any more. ``waits``: it had not been sent, and waits again."""

    work: StageWork
    replica_id: int
    waits: bool = False


@dataclass(frozen=True, slots=True)
class RunsAgain:
    """Interrupted work runs again from the first of ``stages``; `Start` follows.

    ``work``: what was interrupted, in the last of ``stages``. ``leader``: the request in whose name it runs now.
    ``receivers``: all requests that need its output. ``works``: what runs, by stage.
    """

    work: StageWork
    leader: str
    receivers: tuple[str, ...]
    stages: tuple[int, ...]
    works: tuple[StageWork, ...]


@dataclass(frozen=True, slots=True)
class Postponed:
    """Interrupted work waits for a replica, until this time at most."""

    work: StageWork
    until: float


@dataclass(frozen=True, slots=True)
class GivenUp:
    """Fail the requests that need this work: recovery has given it up."""

    work: StageWork
    receivers: tuple[str, ...]
    reason: FailReason


@dataclass(frozen=True, slots=True)
class Unserved:
    """Fail the requests that the driver keeps for a stage without a replica and that came by this time."""

    stage_id: int
    until: float
    reason: FailReason


@dataclass(frozen=True, slots=True)
class Restart:
    """Restart a replica now, after ending what is left of it; `ReplicaUp` or `RestartFailed` is to follow."""

    stage_id: int
    replica_id: int


@dataclass(frozen=True, slots=True)
class Report:
    """Log and count an incident of a replica."""

    incident: Incident


@dataclass(frozen=True, slots=True)
class AnomalyBegins:
    """Log and count an anomaly of a stage, or of a request in it."""

    stage_id: int
    anomaly: Anomaly


@dataclass(frozen=True, slots=True)
class Remedy:
    """Log and count what follows from an anomaly of a replica, and do it; `ReplaceEnded` follows a replacement."""

    decision: RemedyAction


@dataclass(frozen=True, slots=True)
class Forgotten:
    """A request has left and no work that was begun for it goes on: forget it.

    ``works``: its works that have run or followed others, if recovery is on.
    """

    request_id: str
    works: tuple[StageWork, ...] = ()


@dataclass(frozen=True, slots=True)
class Chosen:
    """The replica for a request that was `Asked` for; None: vLLM-Omni's own choice is as good."""

    request_id: str
    replica_id: int | None


@dataclass(frozen=True, slots=True)
class Wake:
    """Pass `Woken` at this time: a batching window is over then, or recovery has something to do (no stage)."""

    stage_id: int | None
    at: float


Event = (
    Arrived
    | Left
    | Submitted
    | Waits
    | Placed
    | Held
    | Resumed
    | TakenOut
    | FirstOutput
    | Finished
    | Withdrawn
    | InputsLost
    | Recalled
    | Undelivered
    | CannotRunAgain
    | Detached
    | StageFailed
    | Dropped
    | Regrouped
    | Renamed
    | Asked
    | ReplicaUp
    | PayloadsMeasured
    | ReplicaStarting
    | ReplicaDown
    | ReplicaDied
    | DeathExamined
    | RestartFailed
    | ReplicaGone
    | ReplicaDraining
    | ReplicaSuspected
    | AnomalyFound
    | ReplaceEnded
    | MemoryMeasured
    | Check
    | Woken
    | Tick
)
Action = (
    Start
    | Follow
    | Lead
    | Ended
    | Proceeds
    | Fails
    | Gone
    | Inherited
    | Continued
    | Stop
    | Lost
    | RunsAgain
    | Postponed
    | GivenUp
    | Unserved
    | Restart
    | Report
    | AnomalyBegins
    | Remedy
    | Forgotten
    | Chosen
    | Wake
)
