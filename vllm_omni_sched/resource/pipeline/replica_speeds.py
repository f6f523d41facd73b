"""Learn the speed of the replicas of a stage from the times of requests."""

import math
from dataclasses import dataclass

RATE = 0.05
"""Weight of the newest time; older ones fade."""
LEAST = 8
"""Times needed before a replica's speed counts; until then it is 1."""
_MOST = 8.0  # largest speed ratio; beyond it, the replica hardly runs the same stage


@dataclass
class _Mean:
    count: int = 0
    value: float = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += max(1 / self.count, RATE) * (value - self.value)


class ReplicaSpeeds:
    """Speed of each replica: the geometric mean of estimated over actual seconds, relative to that of all replicas.

    For a stage with one replica nothing is learned.
    """

    def __init__(self) -> None:
        self._ratios: dict[int, _Mean] = {}
        self._sum, self._known = 0.0, 0  # of the ratios whose mean counts

    def observe(self, replica_id: int, estimated_seconds: float, seconds: float) -> None:
        """Record that a request took so long on a replica.

        Raises:
            ValueError: a time is negative or not finite.
        """
        for value in (estimated_seconds, seconds):
            if not 0 <= value < math.inf:
                raise ValueError(f"seconds must be finite and >= 0, got {value}")
        if not estimated_seconds or not seconds:
            return
        self._drop(ratio := self._ratios.setdefault(replica_id, _Mean()))
        ratio.add(math.log(estimated_seconds / seconds))
        if ratio.count >= LEAST:
            self._sum, self._known = self._sum + ratio.value, self._known + 1

    def forget(self, replica_id: int) -> None:
        """Forget a replica whose place another process or device has taken."""
        ratio = self._ratios.pop(replica_id, None)
        if ratio is not None:
            self._drop(ratio)

    def speed(self, replica_id: int) -> float:
        """Return the speed of the replica relative to the mean of all replicas."""
        mean = self._ratios.get(replica_id)
        if mean is None or mean.count < LEAST or self._known < 2:
            return 1.0
        return min(max(math.exp(mean.value - self._sum / self._known), 1 / _MOST), _MOST)

    def _drop(self, ratio: _Mean) -> None:
        if ratio.count >= LEAST:
            self._sum, self._known = self._sum - ratio.value, self._known - 1
