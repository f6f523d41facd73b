"""Model devices that the replicas of several stages share."""

from collections.abc import Mapping
from typing import Any

from vllm_omni_sched.config.stage_options.graph import PartitionOptions
from vllm_omni_sched.sim.host import Cores, Thread
from vllm_omni_sched.sim.kernel import Action, Simulator


class Device:
    """A device whose replicas are processes that take turns in short time slices.

    Each of n replicas that have work at that time has 1/n of the device. ``speed``: as a multiple of the device whose
    costs are known.
    """

    def __init__(self, sim: Simulator, speed: float) -> None:
        self.speed = speed
        self.turns = Cores(sim, 1)


class DeviceShare:
    """The part of a device that one replica has, for one piece of work at a time: a step, a batch or a request."""

    __slots__ = ("_busy", "_device", "_work")

    def __init__(self, device: Device) -> None:
        self._device = device
        self._work: Thread | None = None
        self._busy = 0.0

    @property
    def speed(self) -> float:
        """Return the speed of the device."""
        return self._device.speed

    def run(self, seconds: float, action: Action, argument: Any) -> None:
        """Run work that takes so long with the device for itself; then call ``action(argument)``."""
        self._work = self._device.turns.run(seconds, (), self._end, (action, argument))

    def _end(self, what: tuple[Action, Any]) -> None:
        assert self._work is not None
        self._busy += self._work.seconds
        self._work = None
        action, argument = what
        action(argument)

    def stop(self) -> None:
        """Stop the work, if there is any; its action is not called."""
        if self._work is not None:
            self._busy = self.busy_seconds()
            self._device.turns.stop(self._work)
            self._work = None

    def busy_seconds(self) -> float:
        """Return the seconds of the device that this replica has had so far."""
        return self._busy + (0.0 if self._work is None else self._device.turns.done_seconds(self._work))


class StageDevices:
    """The devices of placed stages, and where each replica is.

    ``starts_on``: by stage, the device of replicas that start from now on. ``device_of``: by stage and index, the
    device of each replica so far, which keeps it when it restarts.
    """

    def __init__(self, sim: Simulator, options: PartitionOptions, starts_on: Mapping[int, str]) -> None:
        self._devices = {name: Device(sim, device.speed) for name, device in options.devices.items()}
        self.starts_on = dict(starts_on)
        self.device_of: dict[tuple[int, int], str] = {}

    def share(self, stage: int, index: int) -> DeviceShare:
        """Return the share of a replica that starts."""
        name = self.device_of.setdefault((stage, index), self.starts_on[stage])
        return DeviceShare(self._devices[name])
