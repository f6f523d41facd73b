"""Choose which parts of checkpoint files are read ahead before stages load them."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from vllm_omni_sched.config.errors import ConfigError

PIECE_BYTES = 32 << 20
"""Size of the parts that threads read; a file may be read by several threads."""


class PreloadReason(str, Enum):
    """What happens to a file, and why."""

    READ = "read"
    SAME_FILE = "same_file"  # it is read already, for another stage
    NO_MEMORY = "no_memory"  # the memory that may be used is full: the stage reads it itself


@dataclass(frozen=True)
class CheckpointFile:
    """A file that a stage will load. ``identity``: device and inode, equal for the names of one file."""

    path: str
    nbytes: int
    identity: tuple[int, int]


@dataclass(frozen=True)
class Piece:
    """A part of a file."""

    path: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class PreloadPlan:
    """``pieces`` to read, in this order, and the reason for each file."""

    pieces: tuple[Piece, ...]
    reasons: tuple[tuple[CheckpointFile, PreloadReason], ...]

    @property
    def nbytes(self) -> int:
        """Return the bytes that are read."""
        return sum(piece.nbytes for piece in self.pieces)

    def count(self, reason: PreloadReason) -> int:
        """Return the number of files with a reason."""
        return sum(one is reason for _, one in self.reasons)


class Preload:
    """Plans which checkpoint files are read ahead.

    1. Files are read in the given order, which is that in which stages load them; each file once.
    2. Together they take at most ``memory_fraction`` of the memory that is available. The first file that does not fit
       and all after it are left to their stages: to read a late one would evict an early one.
    3. Large files are cut into pieces of `PIECE_BYTES`, so that several threads read one.

    Args:
        memory_fraction: above 0, at most 1.

    Raises:
        ConfigError: the fraction is out of range.
    """

    def __init__(self, memory_fraction: float) -> None:
        if not 0 < memory_fraction <= 1:
            raise ConfigError(f"memory_fraction must be above 0 and at most 1, got {memory_fraction}")
        self.memory_fraction = memory_fraction

    def plan(self, files: Iterable[CheckpointFile], available_bytes: int) -> PreloadPlan:
        """Return what to read. ``available_bytes``: memory of the host that is free, or can be freed at once."""
        room = int(available_bytes * self.memory_fraction)
        seen: set[tuple[int, int]] = set()
        pieces: list[Piece] = []
        reasons: list[tuple[CheckpointFile, PreloadReason]] = []
        is_full = False
        for file in files:
            if file.identity in seen:
                reasons.append((file, PreloadReason.SAME_FILE))
                continue
            is_full = is_full or file.nbytes > room
            if is_full:
                reasons.append((file, PreloadReason.NO_MEMORY))
                continue
            seen.add(file.identity)
            room -= file.nbytes
            reasons.append((file, PreloadReason.READ))
            pieces += [
                Piece(file.path, offset, min(PIECE_BYTES, file.nbytes - offset))
                for offset in range(0, file.nbytes, PIECE_BYTES)
            ]
        return PreloadPlan(tuple(pieces), tuple(reasons))
