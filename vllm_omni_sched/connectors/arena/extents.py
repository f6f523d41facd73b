"""Allocation of extents in a range of bytes: pure bookkeeping, without memory."""

from __future__ import annotations

from bisect import bisect_left, insort


class Extents:
    """Allocator of contiguous extents of whole blocks, the lowest that fits first, so that touched pages are reused.

    Args:
        block_bytes: unit of allocation, in bytes.
        capacity: number of bytes to allocate from, a multiple of ``block_bytes``.
    """

    def __init__(self, block_bytes: int, capacity: int = 0) -> None:
        self.block_bytes = block_bytes
        self.capacity = 0
        self.used_bytes = 0
        self._starts: list[int] = []  # starts of free extents, sorted
        self._free: dict[int, int] = {}  # start -> bytes
        self._used: dict[int, int] = {}
        self.extend(capacity)

    def allocate(self, nbytes: int) -> int | None:
        """Return the offset of ``nbytes``, or None if no free extent is long enough."""
        nbytes = (-(-nbytes // self.block_bytes) or 1) * self.block_bytes  # as `rounded`, without the call
        for place, start in enumerate(self._starts):
            length = self._free[start]
            if length < nbytes:
                continue
            del self._free[start]
            if length > nbytes:
                self._starts[place] = start + nbytes
                self._free[start + nbytes] = length - nbytes
            else:
                del self._starts[place]
            self._used[start] = nbytes
            self.used_bytes += nbytes
            return start
        return None

    def free(self, start: int) -> int:
        """Free an extent; return how many bytes.

        Raises:
            KeyError: no extent is allocated at ``start``.
        """
        nbytes = self._used.pop(start)
        self.used_bytes -= nbytes
        self._put_back(start, nbytes)
        return nbytes

    def trim(self, start: int, nbytes: int) -> None:
        """Shrink an extent to ``nbytes``."""
        had, keeps = self._used[start], self.rounded(nbytes)
        if keeps < had:
            self._used[start] = keeps
            self.used_bytes -= had - keeps
            self._put_back(start + keeps, had - keeps)

    def extend(self, capacity: int) -> None:
        """Increase the capacity."""
        if capacity > self.capacity:
            self._put_back(self.capacity, capacity - self.capacity)
            self.capacity = capacity

    def rounded(self, nbytes: int) -> int:
        """Return the size that an allocation of ``nbytes`` takes."""
        return (-(-nbytes // self.block_bytes) or 1) * self.block_bytes

    @property
    def largest_free_bytes(self) -> int:
        return max(self._free.values(), default=0)

    @property
    def free_at_end(self) -> int:
        """Return the size of the last extent if it is free: capacity added by `extend` joins it."""
        last = self._starts[-1] if self._starts else self.capacity
        return self.capacity - last if last + self._free.get(last, 0) == self.capacity else 0

    @property
    def fragmentation(self) -> float:
        """Return the fragmentation of free room: 0 if it is in one extent, towards 1 if in many."""
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
