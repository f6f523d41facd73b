"""How fast replicas are, and how far from each other, learned from what requests took."""

import math
from dataclasses import dataclass

from vllm_omni_sched.errors import ConfigError


@dataclass
class _Mean:
    """A mean that forgets: what was seen ``1 / rate`` values ago hardly counts."""

    count: int = 0
    value: float = 0.0
    variance: float = 0.0

    def add(self, value: float, rate: float) -> None:
        self.count += 1
        weight = max(1 / self.count, rate)
        delta = value - self.value
        self.value += weight * delta
        self.variance = (1 - weight) * (self.variance + weight * delta * delta)

    def error(self, rate: float) -> float:
        """Standard error of the mean."""
        return math.sqrt(self.variance / min(self.count, 2 / rate))


class Topology:
    """Speed of each replica of a stage, and its distance from each replica of the stage before.

    1. Speed is the geometric mean of estimated over actual seconds, as a multiple of that of all replicas.
    2. Distance is what requests from a source take longer on a replica than on the nearest one, once its speed is
       taken off: links, NUMA nodes, copies between devices. Only what is beyond two standard errors counts.
    3. What was seen fewer than ``least`` times says nothing: speed 1, distance 0.

    Both are relative: of a stage with one replica nothing is learned.

    Args:
        rate: weight of the newest value.
        least: values before a mean counts.

    Raises:
        ConfigError: an argument is out of range.
    """

    _MOST = 8.0  # times as fast or slow as the others; beyond it is no replica of the same stage

    def __init__(self, rate: float = 0.05, least: int = 8) -> None:
        if not 0 < rate <= 1:
            raise ConfigError(f"rate must be in (0, 1], got {rate}")
        if least < 2:
            raise ConfigError(f"least must be 2 or more, got {least}")
        self.rate, self.least = rate, least
        self._ratios: dict[int, _Mean] = {}
        self._late: dict[tuple[int, int], _Mean] = {}

    def observe(self, source: int | None, replica_id: int, estimated_seconds: float, seconds: float) -> None:
        """A request that came from ``source`` (None: from a client) took so long on a replica.

        Raises:
            ValueError: a time is not finite and at least 0.
        """
        for value in (estimated_seconds, seconds):
            if not 0 <= value < math.inf:
                raise ValueError(f"seconds must be finite and >= 0, got {value}")
        if not estimated_seconds or not seconds:
            return
        self._ratios.setdefault(replica_id, _Mean()).add(math.log(estimated_seconds / seconds), self.rate)
        if source is not None:
            late = seconds - estimated_seconds / self.speed(replica_id)
            self._late.setdefault((source, replica_id), _Mean()).add(late, self.rate)

    def forget(self, replica_id: int) -> None:
        """Another process, or another device, has taken its place."""
        self._ratios.pop(replica_id, None)
        for pair in [pair for pair in self._late if pair[1] == replica_id]:
            del self._late[pair]

    def forget_source(self, source: int) -> None:
        """As `forget`, of the stage before."""
        for pair in [pair for pair in self._late if pair[0] == source]:
            del self._late[pair]

    def speed(self, replica_id: int) -> float:
        """As a multiple of the replicas' mean."""
        known = [mean.value for mean in self._ratios.values() if mean.count >= self.least]
        mean = self._ratios.get(replica_id)
        if mean is None or mean.count < self.least or len(known) < 2:
            return 1.0
        return min(max(math.exp(mean.value - math.fsum(known) / len(known)), 1 / self._MOST), self._MOST)

    def distance_seconds(self, source: int | None, replica_id: int) -> float:
        """What a request from there takes longer than on the replica that is nearest to it."""
        if source is None or not self._is_known(source, replica_id):
            return 0.0
        mine = self._late[source, replica_id]
        nearest = min(
            mean.value for (of, replica), mean in self._late.items() if of == source and self._is_known(of, replica)
        )
        beyond = mine.value - nearest
        return beyond if beyond > 2 * mine.error(self.rate) else 0.0

    def _is_known(self, source: int, replica_id: int) -> bool:
        mean = self._late.get((source, replica_id))
        return mean is not None and mean.count >= self.least
