"""Synthetic messages through the connectors of a stage, counted where a transport counts them."""

import random
from collections import Counter
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from vllm_omni_sched.connectors.latency_histogram import LatencyHistogram
from vllm_omni_sched.connectors.transport import Health, Status
from vllm_omni_sched.omni.metrics import TIMES, ConnectorMetrics

POOL_BYTES = 64 << 20
IN_FLIGHT = 4


class ConnectorTraffic:
    """A connector that chooses among the arena, with files below it, and device memory.

    It counts what happens as the real transports do, and is what `ConnectorMetrics` sees of a connector.
    """

    def __init__(self, edge: str, rng: random.Random) -> None:
        self.metrics = ConnectorMetrics()
        self.metrics.add(self)
        self.transport: Any = SimpleNamespace(name="auto")
        self.times = {(what, "arena"): LatencyHistogram() for what in TIMES}
        self._edge, self._rng = edge, rng
        self._arena: Counter[str] = Counter(cache_hits=0, cache_misses=0, damaged=0, corrupt=0)
        self._device: Counter[str] = Counter()
        self._served: Counter[str] = Counter()
        self._alarms: Counter[str] = Counter({f"{edge} stall": 0})
        self._sizes: list[int] = []  # of the latest messages

    def message(self, nbytes: int) -> None:
        """Carry one message."""
        rng = self._rng
        self._sizes = [*self._sizes, nbytes][-IN_FLIGHT:]
        if rng.random() < 0.2:
            self._device.update(device_tensors=2, device_bytes=nbytes, device_opened=1)
            self._served[f"{self._edge} cuda_ipc device"] += 1
            return
        self._served[f"{self._edge} arena auto"] += 1
        self._arena.update(put=1, put_bytes=nbytes, got=1, got_bytes=nbytes, copied_bytes=nbytes // 4)
        self._arena.update(inline=nbytes < 1 << 18, raw_bytes=nbytes, packed_bytes=nbytes * 3 // 5)
        self._arena["cache_hits" if rng.random() < 0.3 else "cache_misses"] += 1
        for what, least in (("put", 2e-4), ("get", 1e-4), ("transfer", 8e-4)):
            self.times[what, "arena"].observe(least * rng.lognormvariate(0, 0.4) + nbytes / 4e9)
        for lost in ("refused", "replaced", "discarded", "expired"):
            self._arena[lost] += rng.random() < 0.01

    def died(self) -> None:
        """Count what the death of a receiver leaves."""
        self._arena.update(given_back=IN_FLIGHT, orphans_given_back=1, orphans_expired=1)
        self._alarms[f"{self._edge} stall"] += 1

    def look(self) -> Health:
        """Return the facts as the transports are now."""
        used = sum(self._sizes)
        pools = {"image": {"used_bytes": used, "capacity_bytes": POOL_BYTES, "fragmentation": used / POOL_BYTES}}
        facts: Mapping[str, Any] = {
            "served": self._served,
            "alarms": self._alarms,
            "arena": {"status": "healthy", "in_flight": len(self._sizes), "pools": pools, **self._arena},
            "tiers": {
                "status": "healthy",
                "tier_messages": {"arena": len(self._sizes), "disk": 1},
                "tier_bytes": {"arena": used, "disk": max(self._sizes, default=0)},
            },
            "cuda_ipc": {
                "status": "healthy",
                "device_held_bytes": used // 4,
                "device_fallbacks": {"no_receiver": self._device["device_tensors"] // 8},
                **self._device,
            },
        }
        return Health(Status.HEALTHY, "", dict(facts))
