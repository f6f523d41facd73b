"""What scheduler and workers tell each other about the host tier of the encoder cache."""

from dataclasses import dataclass, field


@dataclass
class HostOrders:
    """To the workers, with each step. ``drop``, then ``keep``, before the step frees tensors; then ``restore``.

    Attributes:
        drop: encodings (mm_hash) whose place in host memory is wanted.
        keep: encodings that this step frees and that go to host memory: mm_hash, ticket.
        restore: encodings that go back into the encoder cache, and stay in host memory too.
    """

    drop: tuple[str, ...] = ()
    keep: tuple[tuple[str, int], ...] = ()
    restore: tuple[str, ...] = ()


@dataclass
class HostReport:
    """From a worker: what became of `HostOrders`.

    Attributes:
        kept: ticket -> mm_hash, bytes that it takes.
        lost: ticket -> mm_hash; was not there, or found no room.
        embeds: embeddings of what was kept.
        restored_bytes, restored_seconds: of restores that were timed.
    """

    kept: dict[int, tuple[str, int]] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)
    embeds: int = 0
    restored_bytes: int = 0
    restored_seconds: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.kept or self.lost or self.restored_bytes)

    def plus(self, other: "HostReport") -> "HostReport":
        """This one and a later one."""
        return HostReport(
            {**self.kept, **other.kept},
            {**self.lost, **other.lost},
            self.embeds + other.embeds,
            self.restored_bytes + other.restored_bytes,
            self.restored_seconds + other.restored_seconds,
        )
