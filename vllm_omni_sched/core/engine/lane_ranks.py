"""Agreement between the lanes of several workers, which encode the same items together."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

MOST_LOST = 3


class AfterLoss(Enum):
    """What follows the end of a lane."""

    NOTHING = "nothing"  # it was replaced before its end was reported
    RENEW = "renew"  # all workers get new lanes
    STOP = "stop"  # there are no lanes from now on


@dataclass
class _Encode:
    reported: int = 0
    seconds: float = 0.0
    failed: bool = False


class LaneRanks:
    """Decides when all workers have an encoding, and what follows when one of their lanes has ended.

    1. An item is encoded when every worker has reported it, and takes as long as the slowest one. It fails as soon as
       one worker reports that it cannot be encoded.
    2. The lanes of all workers are one generation, because one cannot encode without the others. When one has ended,
       all are replaced in the same step. What was not encoded by then is encoded in that step, by all workers.
    3. Lanes are given up for good when one cannot be replaced, or when `MOST_LOST` generations in a row have ended
       without having encoded an item. An item that was encoded in a step does not count for its generation.

    ``workers``: their number. ``generation``: number of the lanes in use. ``stopped``: whether they were given up.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.generation = 0
        self.stopped = False
        self._lost = 0  # generations in a row that encoded nothing
        self._encodes: dict[int, _Encode] = {}  # ticket -> reports so far
        self._in_step: set[int] = set()  # tickets of items that no lane encodes

    def __len__(self) -> int:
        return len(self._encodes)

    def encoded(self, ticket: int, workers: int, seconds: float) -> float | None:
        """Record that so many workers have encoded an item; return the seconds once all of them have."""
        encode = self._reported(ticket, workers)
        encode.seconds = max(encode.seconds, seconds)
        if encode.failed or encode.reported < self.workers:
            return None
        if ticket not in self._in_step:
            self._lost = 0
        return encode.seconds

    def failed(self, ticket: int, workers: int = 1) -> bool:
        """Record that workers cannot encode an item; return whether this is the first report of that."""
        encode = self._reported(ticket, workers)
        first, encode.failed = not encode.failed, True
        return first

    def awaits(self, ticket: int) -> bool:
        """Return whether the encode of this item goes on, as far as workers have reported."""
        encode = self._encodes.get(ticket)
        return encode is not None and not encode.failed

    def encode_in_step(self, tickets: Iterable[int]) -> None:
        """Record that these items are encoded by all workers in a step, since their lanes are lost."""
        self._in_step = set(tickets)

    def _reported(self, ticket: int, workers: int) -> _Encode:
        encode = self._encodes.setdefault(ticket, _Encode())
        encode.reported += workers
        if encode.reported >= self.workers:
            del self._encodes[ticket]
        return encode

    def renew(self) -> None:
        """Have all lanes replaced, because the weights may have changed; reports so far do not count any more."""
        if self.workers > 1 and not self.stopped:
            self.generation += 1
        self._encodes.clear()

    def lost(self, generation: int, *, final: bool) -> AfterLoss:
        """Record that a lane of this generation has ended, ``final`` if it cannot be replaced.

        Reports of the lanes that were in use do not count any more.
        """
        if self.stopped or generation != self.generation:
            return AfterLoss.NOTHING
        self._lost += 1
        self.generation += 1
        self.stopped = final or self._lost >= MOST_LOST
        self._encodes.clear()
        return AfterLoss.STOP if self.stopped else AfterLoss.RENEW
