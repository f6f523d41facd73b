"""Learn the speed of replicas and their distance from each other from the times of requests."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from vllm_omni_sched.config.errors import ConfigError


@dataclass
class _Mean:
    """An exponentially weighted mean and variance: values older than ``1 / rate`` hardly count."""

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
        """Return the standard error of the mean."""
        return math.sqrt(self.variance / min(self.count, 2 / rate))


class Topology:
    """Speed of each replica of a stage, and its distance from each replica of the previous stage.

    1. Speed is the geometric mean of estimated over actual seconds, relative to that of all replicas.
    2. Distance is the extra time of requests from a source on a replica compared to the nearest one, corrected for
       speed: links, NUMA nodes, copies between devices. Only a difference above two standard errors counts.
    3. Means of fewer than ``least`` values are ignored: speed 1, distance 0.

    Both are relative: for a stage with one replica nothing is learned.

    Args:
        rate: weight of the newest value.
        least: values needed before a mean counts.

    Raises:
        ConfigError: an argument is out of range.
    """

    _MOST = 8.0  # largest speed ratio; beyond it, the replica hardly runs the same stage

    def __init__(self, rate: float = 0.05, least: int = 8) -> None:
        if not 0 < rate <= 1:
            raise ConfigError(f"rate must be in (0, 1], got {rate}")
        if least < 2:
            raise ConfigError(f"least must be 2 or more, got {least}")
        self.rate, self.least = rate, least
        self._ratios: dict[int, _Mean] = {}
        self._sum, self._known = 0.0, 0  # of the ratios whose mean counts
        self._late: dict[int, dict[int, _Mean]] = {}  # source, replica
        self._nearest: dict[int, float] = {}  # least counted mean of each source, where cached

    def observe(self, source: int | None, replica_id: int, estimated_seconds: float, seconds: float) -> None:
        """Record that a request from replica ``source`` (None: from a client) took so long on a replica.

        Raises:
            ValueError: a time is negative or not finite.
        """
        for value in (estimated_seconds, seconds):
            if not 0 <= value < math.inf:
                raise ValueError(f"seconds must be finite and >= 0, got {value}")
        if not estimated_seconds or not seconds:
            return
        self._drop_ratio(ratio := self._ratios.setdefault(replica_id, _Mean()))
        ratio.add(math.log(estimated_seconds / seconds), self.rate)
        if ratio.count >= self.least:
            self._sum, self._known = self._sum + ratio.value, self._known + 1
        if source is not None:
            late = seconds - estimated_seconds / self.speed(replica_id)
            mean = self._late.setdefault(source, {}).setdefault(replica_id, _Mean())
            before = mean.value
            mean.add(late, self.rate)
            nearest = self._nearest.get(source)
            if nearest is not None and mean.count >= self.least:
                if mean.value <= nearest:
                    self._nearest[source] = mean.value
                elif before == nearest:
                    del self._nearest[source]

    def forget(self, replica_id: int) -> None:
        """Forget a replica whose place another process or device has taken."""
        ratio = self._ratios.pop(replica_id, None)
        if ratio is not None:
            self._drop_ratio(ratio)
        for source, late in self._late.items():
            if late.pop(replica_id, None) is not None:
                self._nearest.pop(source, None)

    def forget_source(self, source: int) -> None:
        """Forget a replica of the previous stage."""
        self._late.pop(source, None)
        self._nearest.pop(source, None)

    def speed(self, replica_id: int) -> float:
        """Return the speed of the replica relative to the mean of all replicas."""
        mean = self._ratios.get(replica_id)
        if mean is None or mean.count < self.least or self._known < 2:
            return 1.0
        return min(max(math.exp(mean.value - self._sum / self._known), 1 / self._MOST), self._MOST)

    def distance_seconds(self, source: int | None, replica_id: int) -> float:
        """Return the extra seconds of requests from ``source`` compared to the replica that is nearest to it."""
        late = self._late.get(source, {}) if source is not None else {}
        mine = late.get(replica_id)
        if source is None or mine is None or mine.count < self.least:
            return 0.0
        nearest = self._nearest.get(source)
        if nearest is None:
            nearest = self._nearest[source] = min(mean.value for mean in late.values() if mean.count >= self.least)
        beyond = mine.value - nearest
        return beyond if beyond > 2 * mine.error(self.rate) else 0.0

    def distances(self, source: int | None) -> Mapping[int, float]:
        """Return the non-zero values of `distance_seconds` by replica, computed on access."""
        known = self._late.get(source) if source is not None else None
        return _Distances(self, source, known) if known else {}

    def _drop_ratio(self, ratio: _Mean) -> None:
        if ratio.count >= self.least:
            self._sum, self._known = self._sum - ratio.value, self._known - 1


class _Distances(Mapping[int, float]):
    def __init__(self, topology: Topology, source: int | None, known: Mapping[int, _Mean]) -> None:
        self._topology, self._source, self._known = topology, source, known

    def __getitem__(self, replica_id: int) -> float:
        seconds = self._topology.distance_seconds(self._source, replica_id)
        if not seconds:
            raise KeyError(replica_id)
        return seconds

    def __iter__(self) -> Iterator[int]:
        return (one for one in self._known if self._topology.distance_seconds(self._source, one))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        return True  # possibly wrong, but checking would mean looking at all of them
