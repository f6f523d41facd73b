"""Messages between the two halves of the host tier. Imports no vLLM."""

from dataclasses import dataclass, field


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

    def beside(self, other: "HostReport") -> "HostReport":
        """Merge this report with that of another worker, which carried out the same orders.

        An encoding is kept if no worker has lost it. The slower worker gives the times.
        """
        lost = {**self.lost, **other.lost}
        kept = {ticket: one for ticket, one in {**self.kept, **other.kept}.items() if ticket not in lost}
        slower = max(self, other, key=lambda report: report.restored_seconds)
        return HostReport(kept, lost, max(self.embeds, other.embeds), slower.restored_bytes, slower.restored_seconds)
