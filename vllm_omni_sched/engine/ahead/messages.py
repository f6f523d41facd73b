"""Messages between the scheduler half and the worker half of encode-ahead."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorMetadata, ECConnectorWorkerMetadata

from vllm_omni_sched.engine.ahead.host_messages import HostOrders, HostReport


class RankOrders(NamedTuple):
    """Orders to the workers of several ranks, whose lanes encode together.

    Attributes:
        generation: number of the lanes that must be in use from this step on; a rank that has older ones replaces
            them, and forgets what these were encoding.
        stopped: whether there are no lanes from this step on, so that all items are encoded in the step.
        again: contents to encode in this step, because not all ranks got them from the lanes: mm_hash, new ticket.
        settled: contents that all ranks have encoded, so that their data is not needed any more.
    """

    generation: int = 0
    stopped: bool = False
    again: tuple[tuple[str, int], ...] = ()
    settled: tuple[str, ...] = ()


@dataclass
class AheadOrders(ECConnectorMetadata):
    """Orders to the workers, sent with each step and carried out in the order of the attributes.

    Attributes:
        forget: contents (mm_hash) that no request needs any more.
        load: contents whose encodings go into the encoder cache now, each with the mm_hash of its item there. For the
            lane a content is that mm_hash, unless two items with different data have it (`AheadPlanner`).
        submit: contents to encode: mm_hash, ticket, modality, data, number of embeddings.
        share: share of the device's time that the lane may use, in (0, 1].
        pending: whether encodes are under way; if so, a step without tokens waits for one of them.
        rest_seconds: how long a step with tokens waits for an encode before it begins. No step waits once an encode
            has ended that the scheduler does not know of.
        host: encodings to move to host memory, and to restore from there.
        llm_idle: whether this step has no tokens, so that the lane may use the LLM's processors until the next step.
        ranks: orders that only the workers of an engine with several ranks get; None without news for them. They are
            carried out first.
        known: tickets whose encodes have ended by all reports that the scheduler had when it gave these orders.
        lent: KV blocks whose memory is lent to encodes from now on.
        epoch: how often what was encoded was given up. Workers that are behind drop all encodings, and replace lanes
            that do not see this process's weights, before they carry out anything else.
    """

    forget: tuple[str, ...] = ()
    load: dict[str, str] = field(default_factory=dict)
    submit: list[tuple[str, int, str, Any, int]] = field(default_factory=list)
    share: float = 1.0
    pending: bool = False
    rest_seconds: float = 0.0
    host: HostOrders = field(default_factory=HostOrders)
    ranks: "RankOrders | None" = None
    llm_idle: bool = False
    known: tuple[int, ...] = ()
    lent: tuple[int, ...] = ()
    epoch: int = 0


class LaneFacts(NamedTuple):
    """Properties of a lane that the scheduler needs.

    Attributes:
        items: number of items that the lane encodes at a time; 0 if there is no lane.
        own_processors: on a CPU, whether most of the lane runs on processors that the LLM does not use, so that it
            slows decode steps little.
    """

    items: int = 1
    own_processors: bool = False


NO_LANE = LaneFacts(items=0)


class Encoded(NamedTuple):
    """One encode that has ended: its content (mm_hash), its wall time in the lane, and how many workers report it."""

    mm_hash: str
    seconds: float
    workers: int = 1

    def beside(self, other: "Encoded") -> "Encoded":
        """Merge with the report of other workers; the slowest worker gives the time."""
        return Encoded(self.mm_hash, max(self.seconds, other.seconds), self.workers + other.workers)


class LaneLoss(NamedTuple):
    """The end of a lane of several ranks: its generation, the reason, and whether it cannot be replaced."""

    generation: int
    reason: str
    final: bool = False


@dataclass
class AheadReport(ECConnectorWorkerMetadata):
    """A report of one or several workers, sent with each step: encodes that ended, by the tickets of their orders.

    Attributes:
        ready: ticket -> the encode.
        failed: ticket -> mm_hash, reason.
        restarts: number of times that the lane's process was replaced.
        times: modality -> embeddings made, seconds of their encodes.
        host: results of the orders about host memory.
        lane: properties of the lane.
        loss: end of a lane that needs the scheduler's orders; None if there is none.
        rested: seconds for which the step was held back in favour of the lane.
        given_back_bytes: memory of lent KV blocks that was given back.
        bytes_per_embed: the most memory that an encode took, for each of its embeddings; 0 if none was measured.
        epoch: of the last orders.
    """

    ready: dict[int, Encoded] = field(default_factory=dict)
    failed: dict[int, tuple[str, str]] = field(default_factory=dict)
    restarts: int = 0
    times: dict[str, tuple[int, float]] = field(default_factory=dict)
    host: HostReport = field(default_factory=HostReport)
    lane: LaneFacts = field(default_factory=LaneFacts)
    loss: LaneLoss | None = None
    rested: float = 0.0
    given_back_bytes: int = 0
    bytes_per_embed: float = 0.0
    epoch: int = 0

    def aggregate(self, other: ECConnectorWorkerMetadata) -> "AheadReport":
        """Merge this report with that of another worker about the same step."""
        assert isinstance(other, AheadReport)
        ready = dict(self.ready)
        for ticket, one in other.ready.items():
            ready[ticket] = ready[ticket].beside(one) if ticket in ready else one
        times = dict(self.times)
        for modality, (embeds, seconds) in other.times.items():
            before = times.get(modality, (0, 0.0))
            times[modality] = max(before[0], embeds), max(before[1], seconds)
        losses = [report.loss for report in (self, other) if report.loss is not None]
        return AheadReport(
            ready,
            {**self.failed, **other.failed},
            max(self.restarts, other.restarts),
            times,
            self.host.beside(other.host),
            LaneFacts(max(self.lane.items, other.lane.items), self.lane.own_processors and other.lane.own_processors),
            max(losses, key=lambda loss: (loss.final, loss.generation), default=None),
            max(self.rested, other.rested),
            self.given_back_bytes + other.given_back_bytes,
            max(self.bytes_per_embed, other.bytes_per_embed),
            min(self.epoch, other.epoch),
        )


def merged(one: Any, other: Any) -> Any:
    """Return two reports or statistics of one kind as one; None counts as no report."""
    if one is None or other is None:
        return other if one is None else one
    return one.aggregate(other)
