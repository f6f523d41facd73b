"""What the two halves of the connector of shared encodings tell each other."""

from dataclasses import dataclass, field

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorMetadata, ECConnectorWorkerMetadata


@dataclass
class SharedOrders(ECConnectorMetadata):
    """Orders of a step to the workers.

    ``load``: mm_hash of the encodings that are read from the store in this step. ``member``: token of the member that
    has pinned them. ``step``: number of these orders.
    """

    load: tuple[str, ...] = ()
    member: str = ""
    step: int = 0


@dataclass
class SharedReport(ECConnectorWorkerMetadata):
    """A worker's report: the last orders that it carried out, and what became of the encodings that it offered.

    ``offered``: (mm_hash, value of `PutOutcome`) of each.
    """

    step: int = 0
    offered: list[tuple[str, str]] = field(default_factory=list)

    def aggregate(self, other: ECConnectorWorkerMetadata) -> "SharedReport":
        """Merge the reports of two workers: of the orders, those that both have carried out."""
        assert isinstance(other, SharedReport)
        return SharedReport(min(self.step, other.step), [*self.offered, *other.offered])
