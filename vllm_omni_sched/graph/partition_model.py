"""Model stages on devices: the input of a partition, and the score of an assignment of stages to devices."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from vllm_omni_sched.errors import ConfigError


@dataclass(frozen=True)
class Device:
    """A device; ``speed`` is a multiple of that of the device on which the stages were measured.

    Raises:
        ConfigError: the memory is negative, or the speed is not above 0.
    """

    device_id: str
    memory_bytes: int
    speed: float = 1.0

    def __post_init__(self) -> None:
        if self.memory_bytes < 0:
            raise ConfigError(f"device {self.device_id!r}: memory_bytes must be 0 or more, got {self.memory_bytes}")
        if not 0 < self.speed < math.inf:
            raise ConfigError(f"device {self.device_id!r}: speed must be above 0, got {self.speed}")


@dataclass(frozen=True)
class StageProfile:
    """Resource needs of a stage.

    ``activation_bytes``: for each request of a batch, on top of ``weights_bytes``.
    ``seconds``: for each request, alone on a device of speed 1.
    ``interference``: factor on its seconds when another stage runs on the same device; below 1 where
    the two use resources that the other leaves idle.

    Raises:
        ConfigError: a size or the time is negative, or the factor is not above 0.
    """

    stage_id: int
    weights_bytes: int
    activation_bytes: int
    seconds: float
    interference: float = 1.0

    def __post_init__(self) -> None:
        for name in ("weights_bytes", "activation_bytes", "seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"stage {self.stage_id}: {name} must be 0 or more, got {getattr(self, name)}")
        if not 0 < self.interference < math.inf:
            raise ConfigError(f"stage {self.stage_id}: interference must be above 0, got {self.interference}")


class Score(NamedTuple):
    """Performance of an assignment; compare with `better`.

    ``busiest_seconds``: time of the busiest device per request; a full pipeline finishes one request in this time.
    ``latency_seconds``: latency of a request that never queues: all stages and all transfers, one after the other.
    ``moves``: stages that change their device.
    """

    busiest_seconds: float
    latency_seconds: float
    moves: int


_SAME = 1e-9  # relative; absorbs the rounding of sums in another order


def better(one: Score, other: Score) -> bool:
    """Return whether ``one`` has more throughput than ``other``; if equal, less latency; if equal, fewer moves."""
    for mine, theirs in zip(one, other, strict=True):
        if not math.isclose(mine, theirs, rel_tol=_SAME):
            return mine < theirs
    return False


@dataclass(frozen=True)
class PartitionSnapshot:
    """Everything that a partition depends on.

    ``transfers``: seconds per request from one stage to another, when they are on different devices.
    ``distances``: factor on these between two devices, in this direction; 1 if a pair is missing.
    ``batch``: requests that every stage must be able to hold at once.

    Raises:
        ConfigError: there is no device or no stage, an id is given twice, a number is out of range,
            or a transfer or distance names an unknown stage or device.
    """

    devices: tuple[Device, ...]
    stages: tuple[StageProfile, ...]
    transfers: Mapping[tuple[int, int], float] = field(default_factory=dict)
    distances: Mapping[tuple[str, str], float] = field(default_factory=dict)
    batch: int = 1

    def __post_init__(self) -> None:
        devices = {device.device_id for device in self.devices}
        stages = {stage.stage_id for stage in self.stages}
        if not devices or not stages:
            raise ConfigError("a partition needs a device and a stage at least")
        if len(devices) < len(self.devices) or len(stages) < len(self.stages):
            raise ConfigError("a device or a stage is given twice; name each once")
        if self.batch < 1:
            raise ConfigError(f"batch must be 1 or more, got {self.batch}")
        _check_pairs("transfers", self.transfers, stages)
        _check_pairs("distances", self.distances, devices)

    def room_of(self, device: Device, headroom: float) -> int:
        """Return the bytes of the device for stages, with the fraction ``headroom`` of its memory left free."""
        return math.floor(device.memory_bytes * (1 - headroom))

    def bytes_of(self, stage: StageProfile) -> int:
        """Return the bytes that the stage needs on its device."""
        return stage.weights_bytes + self.batch * stage.activation_bytes

    def between(self, edge: tuple[int, int], device: str, other: str) -> float:
        """Return the seconds of a transfer from a stage on one device to one on the other."""
        return 0.0 if device == other else self.transfers[edge] * self.distances.get((device, other), 1.0)

    @cached_property
    def _device(self) -> dict[str, Device]:
        return {device.device_id: device for device in self.devices}

    def covers(self, assignment: Mapping[int, str]) -> bool:
        """Return whether the assignment gives each of these stages, and no other, a known device."""
        stages = {stage.stage_id for stage in self.stages}
        return set(assignment) == stages and set(assignment.values()) <= set(self._device)

    def fits(self, assignment: Mapping[int, str], headroom: float = 0.0) -> bool:
        """Return whether every device has enough memory, with the fraction ``headroom`` of it left free."""
        used = dict.fromkeys(self._device, 0)
        for stage in self.stages:
            used[assignment[stage.stage_id]] += self.bytes_of(stage)
        return all(used[name] <= self.room_of(device, headroom) for name, device in self._device.items())

    def score(self, assignment: Mapping[int, str], current: Mapping[int, str] | None = None) -> Score:
        """Return the score of the assignment, whether it fits in memory or not."""
        on: dict[str, list[StageProfile]] = {}
        for stage in self.stages:
            on.setdefault(assignment[stage.stage_id], []).append(stage)
        busy = [
            sum(stage.seconds * (stage.interference if len(merged) > 1 else 1.0) for stage in merged)
            / self._device[name].speed
            for name, merged in on.items()
        ]
        moved = sum(self.between(edge, assignment[edge[0]], assignment[edge[1]]) for edge in self.transfers)
        moves = 0 if current is None else sum(current.get(one) != where for one, where in assignment.items())
        return Score(max(busy), sum(busy) + moved, moves)


def _check_pairs(
    name: str, pairs: Mapping[tuple[int, int], float] | Mapping[tuple[str, str], float], known: set[int] | set[str]
) -> None:
    for pair, value in pairs.items():
        if not set(pair) <= known or pair[0] == pair[1]:
            raise ConfigError(f"{name}: {pair} must name two of {sorted(known)}")
        if not 0 <= value < math.inf:
            raise ConfigError(f"{name}[{pair}] must be 0 or more, got {value}")
