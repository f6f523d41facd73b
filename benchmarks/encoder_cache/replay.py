"""Replays a trace on one encoder cache manager; counts, and measures no time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

from benchmarks.encoder_cache.trace import Item, Request
from vllm_omni_sched.config.options import EvictionOrder
from vllm_omni_sched.engine.ahead.host_messages import HostReport
from vllm_omni_sched.engine.ahead.host_planner import HostPlanner
from vllm_omni_sched.engine.encoder.worth import WorthEncoderCacheManager

EMBED_BYTES = 8192  # 4096 numbers of two bytes
SECONDS_PER_BYTE = 1e-10  # 10 GB/s


@dataclass(frozen=True)
class _Feature:
    identifier: str
    modality: str


class _Asker:
    """As much of vLLM's `Request` as a cache manager asks for: its placeholders would be long to build."""

    def __init__(self, request_id: str, items: Sequence[Item]) -> None:
        self.request_id = request_id
        self.mm_features = [_Feature(item.mm_hash, item.modality) for item in items]
        self._items = items

    def get_num_encoder_embeds(self, input_id: int) -> int:
        return self._items[input_id].num_embeds


@dataclass
class Counts:
    """By items, and the seconds of encodes and restores by the assumptions of the trace."""

    device: int = 0
    host: int = 0
    miss: int = 0
    full: int = 0  # no room even when all that may go has gone
    encode_seconds: float = 0.0
    first_seconds: float = 0.0  # part of it: of contents that were never seen before
    restore_seconds: float = 0.0


class Replay:
    """Replay a trace against one variant of `benchmarks.encoder_cache.VARIANTS`.

    Args:
        cache_embeds: capacity, in embeddings.
        host_bytes: capacity of the host tier, of the variant that has one.
    """

    def __init__(self, variant: str, cache_embeds: int, host_bytes: int) -> None:
        self.now = 0.0
        self.counts = Counts()
        self.measured = variant in ("worth, measured", "worth + host")
        order = EvictionOrder.WORTH if variant.startswith("worth") else EvictionOrder.AGE
        self.manager: Any = (
            EncoderCacheManager(cache_embeds)
            if variant == "stock"
            else WorthEncoderCacheManager(cache_embeds, order, EMBED_BYTES, clock=lambda: self.now)
        )
        self.host = HostPlanner(host_bytes if variant == "worth + host" else 0)
        self.host.bind(self.manager)
        self._seen: set[str] = set()
        self._running: list[tuple[float, int, Any]] = []

    def run(self, trace: Sequence[Request]) -> Counts:
        for number, request in enumerate(trace):
            self.now = request.at
            while self._running and self._running[0][0] <= request.at:
                self.manager.free(heappop(self._running)[2])
            self._serve(number, request)
        return self.counts

    def _serve(self, number: int, asked: Request) -> None:
        request = _Asker(f"r{number}", asked.items)
        for i, item in enumerate(asked.items):
            self._take(request, i, item)
        orders = self.host.take_orders(self.manager.get_freed_mm_hashes())
        kept = {ticket: (mm_hash, 1) for mm_hash, ticket in orders.keep}
        self.host.take_report(HostReport(kept))  # a worker that has room for what it is told to keep
        heappush(self._running, (asked.until, number, request))

    def _take(self, request: Any, i: int, item: Item) -> None:
        if self.manager.check_and_update_cache(request, i):
            self.counts.device += 1
            return
        if not self.manager.can_allocate(request, i, item.num_embeds, 0):
            self.counts.full += 1
            return
        self.manager.allocate(request, i)
        num_bytes = item.num_embeds * EMBED_BYTES
        if self.host.restore(item.mm_hash):
            self.counts.host += 1
            self.counts.restore_seconds += num_bytes * SECONDS_PER_BYTE
            self.host.take_report(HostReport(restored_bytes=num_bytes, restored_seconds=num_bytes * SECONDS_PER_BYTE))
            return
        self.counts.miss += 1
        self.counts.encode_seconds += item.encode_seconds
        if item.mm_hash not in self._seen:
            self._seen.add(item.mm_hash)
            self.counts.first_seconds += item.encode_seconds
        if self.measured:
            self.host.take_encode_times({item.modality: (item.num_embeds, item.encode_seconds)})
