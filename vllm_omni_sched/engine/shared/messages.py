"""What the two halves of the connector of shared encodings tell each other."""

from dataclasses import dataclass, field

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorMetadata, ECConnectorWorkerMetadata


@dataclass
class SharedOrders(ECConnectorMetadata):
    """Orders of a step to the workers.

    ``load``: mm_hash -> key in the store, of the encodings that are read in this step. ``offer``: the same of those
    that this step makes, and that are put into the store. ``member``: token of the member that has pinned them.
    ``step``: number of these orders. ``epoch``: how often what was encoded before was given up; workers that are behind
    leave their store for that of the weights that they have now.
    """

    load: dict[str, str] = field(default_factory=dict)
    offer: dict[str, str] = field(default_factory=dict)
    member: str = ""
    step: int = 0
    epoch: int = 0


@dataclass
class SharedReport(ECConnectorWorkerMetadata):
    """A worker's report: the last orders that it carried out, and what became of the encodings that it offered.

    ``offered``: (key, value of `PutOutcome`) of each. ``epoch``: of the last orders. ``space``: name of the store that
    it has entered since the last report; "" for none.
    """

    step: int = 0
    offered: list[tuple[str, str]] = field(default_factory=list)
    epoch: int = 0
    space: str = ""

    def aggregate(self, other: ECConnectorWorkerMetadata) -> "SharedReport":
        """Merge the reports of two workers: of the orders, those that both have carried out."""
        assert isinstance(other, SharedReport)
        return SharedReport(
            min(self.step, other.step),
            [*self.offered, *other.offered],
            min(self.epoch, other.epoch),
            self.space or other.space,
        )
