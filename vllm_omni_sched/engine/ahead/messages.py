"""Messages between the scheduler half and the worker half of encode-ahead, its host tier included."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorMetadata, ECConnectorWorkerMetadata


@dataclass
class HostOrders:
    """Orders to the workers, sent with each step: ``drop``, then ``keep``, before the step frees tensors; then
    ``restore``.

    Attributes:
        drop: encodings (mm_hash) to remove from host memory.
        keep: encodings that this step frees and that go to host memory: mm_hash, ticket.
        restore: encodings (mm_hash) to copy back into the encoder cache; they stay in host memory, too.
    """

    drop: tuple[str, ...] = ()
    keep: tuple[tuple[str, int], ...] = ()
    restore: tuple[str, ...] = ()


@dataclass
class HostReport:
    """A worker's report on the results of `HostOrders`.

    Attributes:
        kept: ticket -> mm_hash, size in bytes.
        lost: ticket -> mm_hash of an encoding that was not there, or found no room.
        embeds: number of embeddings in the kept encodings.
        restored_bytes, restored_seconds: totals of the restores that were timed.
    """

    kept: dict[int, tuple[str, int]] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)
    embeds: int = 0
    restored_bytes: int = 0
    restored_seconds: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.kept or self.lost or self.restored_bytes)

    def plus(self, other: "HostReport") -> "HostReport":
        """Merge this report with a later one."""
        return HostReport(
            {**self.kept, **other.kept},
            {**self.lost, **other.lost},
            self.embeds + other.embeds,
            self.restored_bytes + other.restored_bytes,
            self.restored_seconds + other.restored_seconds,
        )


@dataclass
class AheadOrders(ECConnectorMetadata):
    """Orders to the workers, sent with each step and carried out in the order of the attributes.

    Attributes:
        forget: contents (mm_hash) that no request needs any more.
        load: contents (mm_hash) whose encodings go into the encoder cache now.
        submit: contents to encode: mm_hash, ticket, modality, data, number of embeddings.
        share: share of the device's time that the lane may use, in (0, 1].
        pending: whether encodes are under way; if so, a step without tokens waits for one of them.
        rest_seconds: how long a step with tokens waits for an encode before it begins.
        host: encodings to move to host memory, and to restore from there.
    """

    forget: tuple[str, ...] = ()
    load: tuple[str, ...] = ()
    submit: list[tuple[str, int, str, Any, int]] = field(default_factory=list)
    share: float = 1.0
    pending: bool = False
    rest_seconds: float = 0.0
    host: HostOrders = field(default_factory=HostOrders)


class LaneFacts(NamedTuple):
    """Properties of a lane that the scheduler needs.

    Attributes:
        items: number of items that the lane encodes at a time.
        own_processors: on a CPU, whether most of the lane runs on processors that the LLM does not use, so that it
            slows decode steps little.
    """

    items: int = 1
    own_processors: bool = False


@dataclass
class AheadReport(ECConnectorWorkerMetadata):
    """A worker's report, sent with each step: encodes that ended, by the tickets of their orders.

    Attributes:
        ready: ticket -> mm_hash, seconds in the lane.
        failed: ticket -> mm_hash, reason.
        restarts: number of times that the lane's process was replaced.
        times: modality -> embeddings made, seconds of their encodes.
        host: results of the orders about host memory.
        lane: properties of the lane.
    """

    ready: dict[int, tuple[str, float]] = field(default_factory=dict)
    failed: dict[int, tuple[str, str]] = field(default_factory=dict)
    restarts: int = 0
    times: dict[str, tuple[int, float]] = field(default_factory=dict)
    host: HostReport = field(default_factory=HostReport)
    lane: LaneFacts = field(default_factory=LaneFacts)

    def aggregate(self, other: ECConnectorWorkerMetadata) -> "AheadReport":
        """Merge this report with a later one of the same worker."""
        assert isinstance(other, AheadReport)
        times = dict(self.times)
        for modality, (embeds, seconds) in other.times.items():
            before = times.get(modality, (0, 0.0))
            times[modality] = before[0] + embeds, before[1] + seconds
        return AheadReport(
            {**self.ready, **other.ready},
            {**self.failed, **other.failed},
            max(self.restarts, other.restarts),
            times,
            self.host.plus(other.host),
            other.lane,
        )
