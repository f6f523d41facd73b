"""Who gives out room. Pure bookkeeping, no memory in here."""

from __future__ import annotations

from bisect import bisect_left, insort


class Extents:
    """Contiguous extents of whole blocks, the lowest that fits first: pages touched before are used again, and one that
    stays holds nobody up.

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
    def free_at_end(self) -> int:
        """Bytes of the last extent, if that is free: what `extend` adds is joined to it."""
        last = self._starts[-1] if self._starts else self.capacity
        return self.capacity - last if last + self._free.get(last, 0) == self.capacity else 0

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
