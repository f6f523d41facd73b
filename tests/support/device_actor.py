"""An `Actor` whose tensors lie on a device that is the host's memory."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.arena import EDGE
from tests.support.arena_actor import Actor
from tests.support.host_device import HostDriver, device_path
from tests.support.processes import serve
from vllm_omni_sched.connectors.arena import ArenaOptions
from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.framing import make_message


class DeviceActor(Actor):
    """Runs in a process, with its transport, the device and the payloads it holds."""

    driver: HostDriver

    def open_device(self, arena: dict[str, Any], names: list[str], **options: Any) -> None:
        self.driver = HostDriver(*names)
        self.path = device_path(ArenaOptions.model_validate(arena), self.driver, **options)  # type: ignore[assignment]

    def put(self, key: str, nbytes: int, fill: int, edge: tuple[str, str] = EDGE) -> int:
        tensor = torch.full((1, nbytes), fill, dtype=torch.uint8)
        held_bytes = self.path.put(make_message(Edge(*edge), key, {"x": tensor}))
        tensor.fill_(255)  # it is the sender's again
        return held_bytes

    def get(self, key: str, hold: bool = False, name: str | None = None) -> tuple[int, int] | None:
        arrival = self.path.get(EDGE, key)
        if arrival is None:
            return None
        found = arrival.open()["x"]
        del arrival
        if hold:
            self.held[name or key] = found
        return found.numel(), int(found[0, 0]) if bool((found == found[0, 0]).all()) else -1

    def blocks(self) -> tuple[int, int]:
        """Blocks whose memory there is, and those that are shared."""
        return len(self.driver.files), self.driver.exported


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(DeviceActor)
