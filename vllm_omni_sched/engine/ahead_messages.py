"""What the two halves of the encode-ahead connector tell each other."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorMetadata, ECConnectorWorkerMetadata

from vllm_omni_sched.engine.host_messages import HostOrders, HostReport


@dataclass
class AheadOrders(ECConnectorMetadata):
    """To the workers, with each step, carried out in this order.

    Attributes:
        forget: contents (mm_hash) that nobody wants any more.
        load: encodings that go into the encoder cache now.
        submit: contents to encode: mm_hash, ticket, modality, data.
        share: part of the device's time that the lane may take, in (0, 1].
        pending: encodes are under way; a step without tokens waits for one.
        rest_seconds: a step with tokens waits as long as this for one, before it begins.
        host: what goes to host memory, and what comes back from there.
    """

    forget: tuple[str, ...] = ()
    load: tuple[str, ...] = ()
    submit: list[tuple[str, int, str, Any]] = field(default_factory=list)
    share: float = 1.0
    pending: bool = False
    rest_seconds: float = 0.0
    host: HostOrders = field(default_factory=HostOrders)


class LaneFacts(NamedTuple):
    """What the scheduler must know of a lane.

    Attributes:
        items: how many it encodes at a time.
        own_processors: on a CPU, whether it takes little from decode steps: most of it works on other processors.
    """

    items: int = 1
    own_processors: bool = False


@dataclass
class AheadReport(ECConnectorWorkerMetadata):
    """From a worker, with each step: encodes that ended, by the tickets of their orders.

    Attributes:
        ready: ticket -> mm_hash, seconds in the lane.
        failed: ticket -> mm_hash, reason.
        restarts: times that the lane's process was replaced.
        times: modality -> embeddings made, seconds that took.
        host: what became of orders about host memory.
        lane: what the lane is.
    """

    ready: dict[int, tuple[str, float]] = field(default_factory=dict)
    failed: dict[int, tuple[str, str]] = field(default_factory=dict)
    restarts: int = 0
    times: dict[str, tuple[int, float]] = field(default_factory=dict)
    host: HostReport = field(default_factory=HostReport)
    lane: LaneFacts = field(default_factory=LaneFacts)

    def aggregate(self, other: ECConnectorWorkerMetadata) -> "AheadReport":
        """Reports of one worker, one after the other."""
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
