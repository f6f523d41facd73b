"""Model what an assignment of stages to devices costs: memory, device time, transfers, and the loading of weights.

The place of a stage is written like `devices` in vLLM-Omni's deploy YAML: the ids of its devices, joined by commas. A
stage on several devices is split over them (tensor parallelism). `PartitionSnapshot` scores an assignment.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from vllm_omni_sched.config.errors import ConfigError

Assignment = Mapping[int, str]
"""The place of each stage."""


@dataclass(frozen=True)
class Device:
    """A device; ``speed`` is a multiple of that of the device on which the stages were measured.

    Raises:
        ConfigError: the id has a comma.
    """

    device_id: str
    memory_bytes: int
    speed: float = 1.0

    def __post_init__(self) -> None:
        if "," in self.device_id:
            raise ConfigError(f"device {self.device_id!r}: an id must name one device, without a comma")


def _unsplit() -> dict[int, float]:
    return {1: 1.0}


@dataclass(frozen=True)
class StageProfile:
    """Resource needs of a stage.

    ``activation_bytes``: for each request of a batch, on top of ``weights_bytes``.
    ``seconds``: for each request, alone on a device of speed 1.
    ``interference``: factor on its seconds when another stage runs on one of its devices; below 1 where
    the two use resources that the other leaves idle.
    ``efficiency``: by the number of devices that the stage may have, the part of their joint speed that it gets: with
    0.9 on two devices it is 1.8 times as fast as on one. Each device holds an equal part of the memory.

    Raises:
        ConfigError: no number of devices has an efficiency.
    """

    stage_id: int
    weights_bytes: int
    activation_bytes: int
    seconds: float
    interference: float = 1.0
    efficiency: Mapping[int, float] = field(default_factory=_unsplit)

    def __post_init__(self) -> None:
        if not self.efficiency:
            raise ConfigError(f"stage {self.stage_id}: efficiency must name the numbers of devices it may have")

    def speedup(self, degree: int) -> float:
        """Return how many times as fast the stage is on so many devices of speed 1 as on one."""
        return degree * self.efficiency[degree]


@dataclass(frozen=True)
class LinkSpeeds:
    """Bytes per second between devices, by the devices from and to; ``default`` for pairs that are missing.

    Raises:
        ConfigError: a speed is not above 0.
    """

    speeds: Mapping[tuple[str, str], float] = field(default_factory=dict)
    default: float = math.inf

    def __post_init__(self) -> None:
        for pair, speed in {("", ""): self.default, **self.speeds}.items():
            if not speed > 0:
                name = "->".join(pair) if any(pair) else "default"
                raise ConfigError(f"link {name}: bytes per second must be above 0, got {speed}")

    def quickest(self, source: str, target: str) -> tuple[tuple[str, str] | None, float]:
        """Return the quickest link from a place to another with its speed; None and ``inf`` if they share a device."""
        one, other = source.split(","), target.split(",")
        if set(one) & set(other):
            return None, math.inf
        pairs = [(begin, end) for begin in one for end in other]
        best = max(pairs, key=lambda pair: self.speeds.get(pair, self.default))
        return best, self.speeds.get(best, self.default)


class Score(NamedTuple):
    """Performance of an assignment; compare with `better`.

    ``busiest_seconds``: time of the busiest device or link per request; a full pipeline finishes one request in this
    time.
    ``latency_seconds``: latency of a request that never queues: all stages and all transfers, one after the other.
    ``moves``: stages that change their place.
    ``move_share``: seconds in which the weights of these stages are loaded, as a fraction of the horizon.
    """

    busiest_seconds: float
    latency_seconds: float
    moves: int
    move_share: float = 0.0

    @property
    def paid_seconds(self) -> float:
        """Return the seconds per request, with those that the moves cost spread over the horizon.

        If it is below the present ``busiest_seconds``, then within the horizon more requests are gained than lost,
        even if none is served during the loading.
        """
        return self.busiest_seconds * (1 + self.move_share)


_SAME = 1e-9  # relative; absorbs the rounding of sums in another order


def better(one: Score, other: Score) -> bool:
    """Return whether ``one`` has more throughput, less what its moves cost; if equal, less latency; if equal, fewer
    moves."""
    mine = one.paid_seconds, one.latency_seconds, one.moves
    for value, theirs in zip(mine, (other.paid_seconds, other.latency_seconds, other.moves), strict=True):
        if not math.isclose(value, theirs, rel_tol=_SAME):
            return value < theirs
    return False


@dataclass(frozen=True)
class PartitionSnapshot:
    """Devices, stages and costs from which a partition is planned.

    A stage is split only over devices that follow each other in ``devices``, in the order in which they are wired.

    ``payload_bytes``: bytes per request from one stage to another; they take time where the two share no device.
    ``links``: speed of these transfers; those over one link, in one direction, take turns.
    ``load_bytes_per_second``: speed at which the weights of a stage that moves are loaded.
    ``horizon_seconds``: time in which the gain of a change must pay for its loading.
    ``batch``: requests that every stage must be able to hold at once.

    Raises:
        ConfigError: there is no device or no stage, an id is given twice,
            or a payload or link names an unknown stage or device.
    """

    devices: tuple[Device, ...]
    stages: tuple[StageProfile, ...]
    payload_bytes: Mapping[tuple[int, int], float] = field(default_factory=dict)
    links: LinkSpeeds = field(default_factory=LinkSpeeds)
    load_bytes_per_second: float = math.inf
    horizon_seconds: float = 600.0
    batch: int = 1

    def __post_init__(self) -> None:
        devices = {device.device_id for device in self.devices}
        stages = {stage.stage_id for stage in self.stages}
        if not devices or not stages:
            raise ConfigError("a partition needs a device and a stage at least")
        if len(devices) < len(self.devices) or len(stages) < len(self.stages):
            raise ConfigError("a device or a stage is given twice; name each once")
        _check_pairs("payload_bytes", self.payload_bytes, stages)
        _check_pairs("links", self.links.speeds, devices)

    def room_of(self, device: Device, headroom: float) -> int:
        """Return the bytes of the device for stages, with the fraction ``headroom`` of its memory left free."""
        return math.floor(device.memory_bytes * (1 - headroom))

    def bytes_of(self, stage: StageProfile, degree: int = 1) -> int:
        """Return the bytes that the stage needs on each device if it is on so many."""
        return -(-(stage.weights_bytes + self.batch * stage.activation_bytes) // degree)

    @cached_property
    def stage(self) -> dict[int, StageProfile]:
        """Return the stages by id."""
        return {stage.stage_id: stage for stage in self.stages}

    @cached_property
    def _device(self) -> dict[str, Device]:
        return {device.device_id: device for device in self.devices}

    @cached_property
    def places(self) -> dict[int, dict[str, tuple[int, ...]]]:
        """Return the places that each stage may have, with the positions of their devices; the smallest first."""
        ids, found = [device.device_id for device in self.devices], {}
        for stage in self.stages:
            groups = [
                tuple(range(begin, begin + degree))
                for degree in sorted(stage.efficiency)
                for begin in range(len(ids) - degree + 1)
            ]
            found[stage.stage_id] = {",".join(ids[n] for n in group): group for group in groups}
        return found

    def covers(self, assignment: Assignment) -> bool:
        """Return whether the assignment gives each of these stages, and no other, a place that it may have."""
        return set(assignment) == set(self.stage) and all(
            where in self.places[stage_id] for stage_id, where in assignment.items()
        )

    def fits(self, assignment: Assignment, headroom: float = 0.0) -> bool:
        """Return whether every device has enough memory, with the fraction ``headroom`` of it left free."""
        used = dict.fromkeys(self._device, 0)
        for stage in self.stages:
            on = assignment[stage.stage_id].split(",")
            for name in on:
                used[name] += self.bytes_of(stage, len(on))
        return all(used[name] <= self.room_of(device, headroom) for name, device in self._device.items())

    @cached_property
    def _links(self) -> dict[tuple[str, str], tuple[tuple[str, str] | None, float]]:
        return {}

    def link(self, source: str, target: str) -> tuple[tuple[str, str] | None, float]:
        """Return the quickest link from a place to another with its speed, as `LinkSpeeds.quickest` does."""
        if (found := self._links.get((source, target))) is None:
            found = self._links[source, target] = self.links.quickest(source, target)
        return found

    def seconds_on(self, stage: StageProfile, on: tuple[int, ...]) -> float:
        """Return the seconds of a request in the stage, alone on the devices at these positions."""
        return stage.seconds / (stage.speedup(len(on)) * min(self.devices[n].speed for n in on))

    def loading_share(self, stage: StageProfile) -> float:
        """Return the time in which the weights of the stage are loaded, as a fraction of the horizon."""
        return stage.weights_bytes / self.load_bytes_per_second / self.horizon_seconds

    def score(self, assignment: Assignment, current: Assignment | None = None) -> Score:
        """Return the score of the assignment, whether it fits in memory or not."""
        groups = {stage_id: self.places[stage_id][where] for stage_id, where in assignment.items()}
        crowd = [0] * len(self.devices)
        for group in groups.values():
            for n in group:
                crowd[n] += 1
        busy, latency = [0.0] * len(self.devices), 0.0
        for stage in self.stages:
            group = groups[stage.stage_id]
            seconds = self.seconds_on(stage, group)
            if any(crowd[n] > 1 for n in group):
                seconds *= stage.interference
            latency += seconds
            for n in group:
                busy[n] += seconds
        on_link: dict[tuple[str, str], float] = {}
        for (source, target), nbytes in self.payload_bytes.items():
            link, speed = self.link(assignment[source], assignment[target])
            if link is not None:
                on_link[link] = on_link.get(link, 0.0) + nbytes / speed
        moved = [] if current is None else [one for one, where in assignment.items() if current.get(one) != where]
        share = sum(self.loading_share(self.stage[one]) for one in moved)
        return Score(max(*busy, *on_link.values(), 0.0), latency + sum(on_link.values()), len(moved), share)


def _check_pairs(
    name: str, pairs: Mapping[tuple[int, int], float] | Mapping[tuple[str, str], float], known: set[int] | set[str]
) -> None:
    for pair in pairs:
        if not set(pair) <= known or pair[0] == pair[1]:
            raise ConfigError(f"{name}: {pair} must name two of {sorted(known)}")
