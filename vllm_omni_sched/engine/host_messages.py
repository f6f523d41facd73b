"""Messages between scheduler and workers about the host tier of the encoder cache."""

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

    def plus(self, other: "HostReport") -> "HostReport":
        """Merge this report with a later one."""
        return HostReport(
            {**self.kept, **other.kept},
            {**self.lost, **other.lost},
            self.embeds + other.embeds,
            self.restored_bytes + other.restored_bytes,
            self.restored_seconds + other.restored_seconds,
        )
