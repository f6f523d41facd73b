"""Decide when stages move between devices, and which one moves next."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.stage_options.graph import PartitionOptions, ProfileOptions
from vllm_omni_sched.graph.partition import Partitioner, Plan
from vllm_omni_sched.graph.partition_model import Device, LinkSpeeds, PartitionSnapshot, StageProfile

CHECK_SECONDS = 5.0  # between two checks of the stages' memory


class PlacedStage(NamedTuple):
    """A stage that may be placed, with what its replica needs.

    ``device``: the devices of the replica, joined by commas.
    ``nbytes``: memory that the replica holds, 0 if unknown. ``seconds``: of a request on the present device, None if
    unknown.
    """

    stage_id: int
    device: str
    nbytes: int
    seconds: float | None


class StageMove(NamedTuple):
    """A stage that moves to other devices, each joined by commas."""

    stage_id: int
    source: str
    target: str


class Decision(NamedTuple):
    """A new plan, None if nothing was planned, and the move to begin now, if any."""

    plan: Plan | None = None
    move: StageMove | None = None


class StagePlacement:
    """Decides which device each stage runs on while requests run; a driver carries out the moves.

    1. A stage needs the memory that its replica holds, and the device seconds of its requests; both must be known for
       all stages before anything is planned. A profile in the options sets the seconds and the least memory. Payloads
       between placed stages take the time that the options say.
    2. Stages that are not placed keep their memory: the driver reports it as fixed.
    3. A check is due `CHECK_SECONDS` after the last one, and not during a move.
    4. `Partitioner` plans the devices: for more throughput, or because the memory of a device no longer suffices.
    5. One stage moves at a time: the first whose target has room for it beside all stages that are there, since the
       new replica starts before the old one stops. If the driver refuses a move, the next such stage is tried. If
       there is none, nothing moves.
    6. A plan with several moves goes on at the next check after a move that succeeded. It is dropped, and the next
       check plans anew, if a move failed or none can begin, if the stages or devices have changed, or if the plan no
       longer fits in memory.

    7. A running stage keeps the number of its devices.

    The driver calls `check` with the facts when `is_due`, answers a move that it cannot begin with `refused`, and
    reports the end of a move with `ended`. This class reads no clock.

    Args:
        options: the devices, the profiles, and bounds for changes of the plan.
        names: names of the stages by id.
    """

    def __init__(self, options: PartitionOptions, names: Mapping[int, str]) -> None:
        self._profiles = {stage_id: options.profile_of(stage_id, name) for stage_id, name in names.items()}
        self._options, self._payloads = options, options.payloads(names)
        self._partitioner = Partitioner(options.min_gain, options.cooldown_seconds)
        self._next = 0.0
        self._wanted: Mapping[int, str] | None = None  # target of a plan that has begun to move stages
        self._goes_on = False  # the moves below continue that plan
        self._moves: deque[StageMove] = deque()  # possible next moves that were not tried yet
        self._facts: tuple[PartitionSnapshot, dict[int, str], float] | None = None  # of the last check

    def is_due(self, now: float, moving: bool) -> bool:
        """Return whether the facts are to be gathered for a check; ``moving``: a replica moves now."""
        return now >= self._next and not moving

    def check(self, stages: Sequence[PlacedStage], fixed: Mapping[str, int], now: float) -> Decision:
        """Return the next move of the plan, or a new plan with its first move.

        Args:
            stages: the stages that may be placed: one replica on one device that the options name.
            fixed: bytes that all other stages hold, by device.
        """
        self._next = now + CHECK_SECONDS
        self._moves.clear()
        snapshot = self._snapshot(stages, fixed)
        if snapshot is None:
            return Decision()
        current = {stage.stage_id: stage.device for stage in stages}
        self._facts = snapshot, current, now
        wanted = self._wanted
        if wanted is not None and wanted != current and snapshot.covers(wanted) and snapshot.fits(wanted):
            self._goes_on = True
            self._moves.extend(_possible_moves(snapshot, current, wanted))
            return self._next_move()
        return self._plan()

    def refused(self) -> Decision:
        """Return what to do instead of the last move, which cannot begin."""
        return self._next_move()

    def ended(self, moved: bool) -> None:
        """Record the end of a move: ``moved`` is False if it failed."""
        if not moved:
            self._wanted = None

    def _next_move(self) -> Decision:
        if self._moves:
            return Decision(move=self._moves.popleft())
        self._wanted = None
        return self._plan() if self._goes_on else Decision()

    def _plan(self) -> Decision:
        assert self._facts is not None
        snapshot, current, now = self._facts
        self._wanted, self._goes_on = None, False
        plan = self._partitioner.plan(snapshot, current, now)
        if plan.assignment is None or not plan.moves:
            return Decision(plan)
        self._wanted = plan.assignment
        self._moves.extend(_possible_moves(snapshot, current, plan.assignment))
        return Decision(plan, self._next_move().move)

    def _snapshot(self, stages: Sequence[PlacedStage], fixed: Mapping[str, int]) -> PartitionSnapshot | None:
        profiles = []
        for stage in stages:
            profile, degree = self._profiles[stage.stage_id], stage.device.count(",") + 1
            if profile is not None:
                held = max(stage.nbytes, profile.memory_bytes)
                efficiency = {degree: profile.efficiency.get(degree, 1.0)}
                profiles.append(_needs(stage.stage_id, profile, held, efficiency))
            elif not stage.nbytes or stage.seconds is None:
                return None
            else:
                speed = degree * min(self._options.devices[one].speed for one in stage.device.split(","))
                measured = stage.seconds * speed
                profiles.append(StageProfile(stage.stage_id, stage.nbytes, 0, measured, efficiency={degree: 1.0}))
        return _snapshot(self._options, profiles, self._payloads, fixed) if profiles else None


def first_plan(
    options: PartitionOptions,
    profiles: Mapping[int, ProfileOptions | None],
    fixed: Mapping[str, int],
    payloads: Mapping[tuple[int, int], float],
    splits: bool,
) -> Plan | None:
    """Return the plan by which stages start; None if one has no profile, so that all start as configured.

    Args:
        profiles: of the stages that may be placed.
        fixed: bytes that all other stages hold, by device.
        payloads: bytes of a request by edge, as `PartitionOptions.payloads` returns them.
        splits: stages may get several devices; if False, each gets one.

    Raises:
        ConfigError: no plan fits.
    """
    snapshot = first_snapshot(options, profiles, fixed, payloads, splits)
    if snapshot is None:
        return None
    plan = Partitioner(options.min_gain).plan(snapshot, None, 0.0)
    if plan.assignment is None:
        raise ConfigError(f"option 'graph.partition': {plan}; name more devices, or correct 'profiles'")
    return plan


def first_snapshot(
    options: PartitionOptions,
    profiles: Mapping[int, ProfileOptions | None],
    fixed: Mapping[str, int],
    payloads: Mapping[tuple[int, int], float],
    splits: bool,
) -> PartitionSnapshot | None:
    """Return the snapshot of which `first_plan` makes its plan; None if a stage has no profile, or there is none."""
    needs = [
        _needs(stage_id, profile, profile.memory_bytes, profile.efficiency if splits else {1: 1.0})
        for stage_id, profile in profiles.items()
        if profile is not None
    ]
    if not needs or len(needs) < len(profiles):
        return None
    return _snapshot(options, needs, payloads, fixed)


def _needs(stage_id: int, profile: ProfileOptions, held: int, efficiency: Mapping[int, float]) -> StageProfile:
    loaded = profile.loaded_bytes
    return StageProfile(stage_id, loaded, held - loaded, profile.seconds, efficiency=efficiency)


def _snapshot(
    options: PartitionOptions,
    profiles: Sequence[StageProfile],
    payloads: Mapping[tuple[int, int], float],
    fixed: Mapping[str, int],
) -> PartitionSnapshot:
    """Return a snapshot of these stages, with the payloads between them."""
    placed = {profile.stage_id for profile in profiles}
    return PartitionSnapshot(
        _devices(options, fixed),
        tuple(profiles),
        {edge: nbytes for edge, nbytes in payloads.items() if placed.issuperset(edge)},
        link_speeds(options),
        options.load_bytes_per_second or math.inf,
        options.horizon_seconds,
    )


def link_speeds(options: PartitionOptions) -> LinkSpeeds:
    """Return the speeds of links between devices that the options give."""
    return LinkSpeeds(options.link_speeds, options.link_bytes_per_second or math.inf)


def _devices(options: PartitionOptions, fixed: Mapping[str, int]) -> tuple[Device, ...]:
    """Return the devices with the memory that is left to placed stages."""
    return tuple(
        Device(name, max(device.memory_bytes - fixed.get(name, 0), 0), device.speed)
        for name, device in options.devices.items()
    )


def _possible_moves(
    snapshot: PartitionSnapshot, current: Mapping[int, str], wanted: Mapping[int, str]
) -> list[StageMove]:
    """Return the moves whose target has room for one more stage."""
    room = {device.device_id: device.memory_bytes for device in snapshot.devices}

    def needs(stage: StageProfile, place: str) -> dict[str, int]:
        on = place.split(",")
        return dict.fromkeys(on, snapshot.bytes_of(stage, len(on)))

    for stage in snapshot.stages:
        for device, nbytes in needs(stage, current[stage.stage_id]).items():
            room[device] -= nbytes
    return [
        StageMove(stage.stage_id, current[stage.stage_id], wanted[stage.stage_id])
        for stage in snapshot.stages
        if wanted[stage.stage_id] != current[stage.stage_id]
        and all(room[device] >= nbytes for device, nbytes in needs(stage, wanted[stage.stage_id]).items())
    ]
