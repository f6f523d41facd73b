"""Who gives out room: extents for pools, a ring for small messages. Pure bookkeeping, no memory in here."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque


class Extents:
    """Contiguous extents of whole blocks, the lowest that fits first: pages touched before are used again.

    Args:
        block_bytes: room is given out in multiples of it.
        capacity: bytes to give out, a multiple of ``block_bytes``.
    """

    def __init__(self, block_bytes: int, capacity: int = 0) -> None:
        self.block_bytes = block_bytes
        self.capacity = 0
        self.used_bytes = 0
        self._starts: list[int] = []  # of free extents, sorted
        self._free: dict[int, int] = {}  # start -> bytes
        self._used: dict[int, int] = {}
        self.extend(capacity)

    def allocate(self, nbytes: int) -> int | None:
        """Where ``nbytes`` lie now, or None when no free extent is that long."""
        nbytes = self.rounded(nbytes)
        for place, start in enumerate(self._starts):
            length = self._free[start]
            if length < nbytes:
                continue
            del self._starts[place], self._free[start]
            if length > nbytes:
                self._starts.insert(place, start + nbytes)
                self._free[start + nbytes] = length - nbytes
            self._used[start] = nbytes
            self.used_bytes += nbytes
            return start
        return None

    def free(self, start: int) -> int:
        """Take an extent back; how many bytes.

        Raises:
            KeyError: nothing was given out at ``start``.
        """
        nbytes = self._used.pop(start)
        self.used_bytes -= nbytes
        self._put_back(start, nbytes)
        return nbytes

    def trim(self, start: int, nbytes: int) -> None:
        """Take back what an extent has beyond ``nbytes``."""
        had, keeps = self._used[start], self.rounded(nbytes)
        if keeps < had:
            self._used[start] = keeps
            self.used_bytes -= had - keeps
            self._put_back(start + keeps, had - keeps)

    def extend(self, capacity: int) -> None:
        """Have more to give out."""
        if capacity > self.capacity:
            self._put_back(self.capacity, capacity - self.capacity)
            self.capacity = capacity

    def rounded(self, nbytes: int) -> int:
        """What an allocation of ``nbytes`` takes."""
        return max(1, -(-nbytes // self.block_bytes)) * self.block_bytes

    @property
    def largest_free_bytes(self) -> int:
        return max(self._free.values(), default=0)

    @property
    def fragmentation(self) -> float:
        """0: what is free is in one piece; towards 1: in many."""
        free = self.capacity - self.used_bytes
        return 1 - self.largest_free_bytes / free if free else 0.0

    def _put_back(self, start: int, nbytes: int) -> None:
        place = bisect_left(self._starts, start)
        if place < len(self._starts) and self._starts[place] == start + nbytes:  # the next one is free, too
            nbytes += self._free.pop(self._starts.pop(place))
        if place and self._starts[place - 1] + self._free[self._starts[place - 1]] == start:
            self._free[self._starts[place - 1]] += nbytes
            return
        insort(self._starts, start)
        self._free[start] = nbytes


class Ring:
    """Room in the order of asking, for messages that are short and soon gone; given back in any order.

    One that stays holds up what lies behind it: then `allocate` says None and the caller asks elsewhere.
    """

    def __init__(self, capacity: int, align: int = 64) -> None:
        self.capacity, self.block_bytes = capacity, align
        self.used_bytes = 0
        self._order: deque[tuple[int, int]] = deque()  # given out, oldest first
        self._gone: set[int] = set()
        self._sizes: dict[int, int] = {}
        self._next = 0

    def allocate(self, nbytes: int) -> int | None:
        """Where ``nbytes`` lie now, or None."""
        nbytes = self.rounded(nbytes)
        start = self._next
        oldest = self._order[0][0] if self._order else None
        if oldest is None:
            start = 0 if start + nbytes > self.capacity else start
            fits = nbytes <= self.capacity
        elif start > oldest:  # free: from here to the end, and from 0 to the oldest
            if start + nbytes > self.capacity:
                start = 0
            fits = start + nbytes <= (oldest if start == 0 else self.capacity)
        else:
            fits = start + nbytes <= oldest
        if not fits:
            return None
        self._next = start + nbytes
        self._order.append((start, nbytes))
        self._sizes[start] = nbytes
        self.used_bytes += nbytes
        return start

    def free(self, start: int) -> int:
        """Take it back; how many bytes.

        Raises:
            KeyError: nothing was given out at ``start``.
        """
        nbytes = self._sizes.pop(start)
        self.used_bytes -= nbytes
        self._gone.add(start)
        while self._order and self._order[0][0] in self._gone:
            self._gone.remove(self._order.popleft()[0])
        if not self._order:
            self._next = 0  # memory that was used just now is still in the processor's cache
        return nbytes

    def rounded(self, nbytes: int) -> int:
        """What an allocation of ``nbytes`` takes."""
        return max(1, -(-nbytes // self.block_bytes)) * self.block_bytes
