"""A sender and a receiver in one process, over a device that is the host's memory."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.arena import FakeClock
from tests.support.host_device import HostDriver, device_path
from vllm_omni_sched.connectors.arena import ArenaOptions
from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.framing import make_message

AB = Edge("a", "b")
BASE = torch.arange(2 * 6 * 8).reshape(2, 6, 8)


class Pair:
    """A sender and a receiver in one process; the receiver has announced itself."""

    def __init__(self, arena: ArenaOptions, names: tuple[str, ...] = (), **options: Any) -> None:
        self.driver, self.clock = HostDriver(), FakeClock()
        self.sender = device_path(arena, self.driver, self.clock, **options)
        self.receiver = device_path(arena, HostDriver(*names), self.clock, **options)
        assert self.receiver.get(AB, "nothing") is None

    def put(self, payload: Any, key: str = "k") -> int:
        return self.sender.put(make_message(AB, key, payload))

    def get(self, key: str = "k") -> Any:
        arrival = self.receiver.get(AB, key)
        return None if arrival is None else arrival.open()

    def facts(self) -> dict[str, Any]:
        return self.sender.health().facts

    def blocks(self) -> int:
        """Blocks whose memory there is; what is shared is accounted for."""
        facts = self.facts()
        assert (self.driver.exported == 0) is (facts["device_held_bytes"] == 0)
        return len(self.driver.files)

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()
