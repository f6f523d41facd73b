"""Model devices that the replicas of several stages share."""

from collections.abc import Mapping
from typing import Any

from vllm_omni_sched.config.stage_options.graph import PartitionOptions
from vllm_omni_sched.core.pipeline.placement import link_speeds
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
    """The part of a device that one replica has, for one piece of work at a time: a step, a batch or a request.

    A replica on several devices runs each piece of work on all of them at once; it ends when the last one has ended.

    Args:
        others: the other devices of the replica.
        speedup: how many times as fast the replica is on all of them as on the slowest one.
    """

    __slots__ = ("_busy", "_devices", "_seconds", "_work", "speed")

    def __init__(self, device: Device, *others: Device, speedup: float = 1.0) -> None:
        self._devices = (device, *others)
        self._work: dict[Device, Thread] = {}  # on the devices that have not ended it
        self._seconds = 0.0
        self._busy = 0.0
        self.speed = speedup * min(one.speed for one in self._devices)

    def run(self, seconds: float, action: Action, argument: Any) -> None:
        """Run work that takes so long with the devices for itself; then call ``action(argument)``."""
        self._seconds = seconds
        for device in self._devices:
            self._work[device] = device.turns.run(seconds, (), self._end, (device, action, argument))

    def _end(self, what: tuple[Device, Action, Any]) -> None:
        device, action, argument = what
        del self._work[device]
        if not self._work:
            self._busy += self._seconds
            action(argument)

    def stop(self) -> None:
        """Stop the work, if there is any; its action is not called."""
        if self._work:
            self._busy = self.busy_seconds()
            for device, work in self._work.items():
                device.turns.stop(work)
            self._work.clear()

    def busy_seconds(self) -> float:
        """Return the seconds of a device that this replica has had so far: of the one that has done the most."""
        if not self._work:
            return self._busy
        if len(self._work) < len(self._devices):
            return self._busy + self._seconds
        return self._busy + max(device.turns.done_seconds(work) for device, work in self._work.items())


class PayloadLink:
    """The transfer of the payloads of one edge, over the quickest link between the devices of its stages.

    Payloads over one link, in one direction, are sent first come first served. Stages that share a device send at once.
    """

    def __init__(self, devices: "StageDevices", edge: tuple[int, int], nbytes: float) -> None:
        self._devices, self._edge, self._nbytes = devices, edge, nbytes

    def send(self, run: Any, source: int, arrived: Action, stage: int) -> None:
        """Send what a replica has made for a request to a stage; then ``arrived((run, stage))`` happens."""
        begin = self._devices.device_of[self._edge[0], source]
        self._devices.send(begin, self._devices.starts_on[self._edge[1]], self._nbytes, arrived, (run, stage))


class StageDevices:
    """The devices of placed stages, and where each replica is.

    ``starts_on``: by stage, the devices of replicas that start from now on. ``device_of``: by stage and index, the
    devices of each replica so far, which keeps them when it restarts. Several devices are joined by commas.
    """

    def __init__(
        self, sim: Simulator, options: PartitionOptions, starts_on: Mapping[int, str], names: Mapping[int, str]
    ) -> None:
        self._sim, self._links = sim, link_speeds(options)
        self._devices = {name: Device(sim, device.speed) for name, device in options.devices.items()}
        self._payloads = options.payloads(names)
        self._profiles = {stage: options.profile_of(stage, name) for stage, name in names.items()}
        self._free_at: dict[tuple[str, str], float] = {}  # by link
        self.starts_on = dict(starts_on)
        self.device_of: dict[tuple[int, int], str] = {}

    def share(self, stage: int, index: int) -> DeviceShare:
        """Return the share of a replica that starts."""
        on = self.device_of.setdefault((stage, index), self.starts_on[stage]).split(",")
        profile = self._profiles[stage]
        speedup = len(on) * (1.0 if profile is None else profile.efficiency[len(on)])
        first, *others = (self._devices[name] for name in on)
        return DeviceShare(first, *others, speedup=speedup)

    def payload_links(self) -> dict[tuple[int, int], PayloadLink]:
        """Return the links of edges between placed stages whose payloads are known."""
        return {
            edge: PayloadLink(self, edge, nbytes)
            for edge, nbytes in self._payloads.items()
            if set(edge) <= set(self.starts_on)
        }

    def send(self, source: str, target: str, nbytes: float, action: Action, argument: Any) -> None:
        """Send so many bytes from devices to others; then call ``action(argument)``."""
        link, speed = self._links.quickest(source, target)
        ends = self._sim.now
        if link is not None:
            self._free_at[link] = ends = max(self._free_at.get(link, 0.0), ends) + nbytes / speed
        self._sim.at(ends, action, argument)
