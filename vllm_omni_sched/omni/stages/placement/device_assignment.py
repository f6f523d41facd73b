"""Track the devices of each replica, and those that are free since a replica was moved away."""

from __future__ import annotations

from typing import Any

from vllm_omni_sched.monitor.recovery.events import Replica


class DeviceAssignment:
    """Tracks the devices of replicas, initially those of the deploy YAML, and then as changed by moves.

    Devices are a string of devices as in vLLM-Omni (``"2,3"``), or None if none is named.

    Args:
        runtime: vLLM-Omni's `StageRuntime`.
    """

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._found: dict[Replica, str | None] | None = None
        self._moved: set[Replica] = set()
        self.spare: list[str | None] = []

    def __contains__(self, replica: Replica) -> bool:
        return replica in self._all()

    def devices_of(self, replica: Replica) -> str | None:
        """Return the devices of a replica.

        Raises:
            KeyError: there is no such replica.
        """
        return self._all()[replica]

    def was_moved(self, replica: Replica) -> bool:
        """Return whether the replica was moved from its devices in the deploy YAML; cheap before anything was moved."""
        return replica in self._moved

    def replicas(self, stage_id: int) -> list[Replica]:
        """Return the replicas of one stage, including those that are to be restarted."""
        return sorted(replica for replica in self._all() if replica.stage == stage_id)

    def assign(self, replica: Replica, devices: str | None) -> None:
        self._all()[replica] = devices
        self._moved.add(replica)

    def remove(self, replica: Replica) -> str | None:
        """Remove a replica that no longer exists, and return its devices."""
        self._moved.discard(replica)
        return self._all().pop(replica)

    def next_free(self, stage_id: int) -> Replica:
        """Return the first free replica number of the stage."""
        taken, index = self._all(), 0
        while Replica(stage_id, index) in taken:
            index += 1
        return Replica(stage_id, index)

    def fits(self, stage_id: int, devices: str | None) -> bool:
        """Return whether a replica of the stage needs that number of devices."""
        from vllm_omni.engine.stage_init_utils import get_stage_devices_per_replica

        return devices is None or _count(devices) == get_stage_devices_per_replica(
            self._runtime._stage_configs[stage_id]
        )

    def _all(self) -> dict[Replica, str | None]:
        if self._found is None:
            from vllm_omni.engine.stage_init_utils import compute_replica_layout

            counts, devices = compute_replica_layout(self._runtime._stage_configs)
            self._found = {
                Replica(stage_id, index): devices[stage_id][index]
                if stage_id in devices
                else _devices(self._runtime._stage_configs[stage_id])
                for stage_id, count in enumerate(counts)
                for index in range(count)
            }
        return self._found


def _devices(stage_config: Any) -> str | None:
    runtime: Any = getattr(stage_config, "runtime_config", getattr(stage_config, "runtime", None))
    found = runtime.get("devices") if hasattr(runtime, "get") else getattr(runtime, "devices", None)
    return None if found is None else str(found)


def _count(devices: str) -> int:
    return len([one for one in devices.split(",") if one.strip()])
