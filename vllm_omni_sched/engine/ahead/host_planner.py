"""Scheduler half of the host tier: decides which evicted encodings workers keep, and which are restored."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

from vllm_omni_sched.engine.ahead.host_messages import HostOrders, HostReport
from vllm_omni_sched.engine.contents import Contents
from vllm_omni_sched.engine.encoder.cache import OmniEncoderCacheManager
from vllm_omni_sched.monitor.counts import SchedulerMetrics
from vllm_omni_sched.resource.engine.host_tier import Encoding, HostReason, HostTier
from vllm_omni_sched.resource.engine.reuse import NotReused
from vllm_omni_sched.resource.rate import EncodeCost, Rate

_START_SECONDS_PER_BYTE = 1e-9  # 1 GB/s, slower than any bus: until a restore was timed, few encodings are kept in vain


class _Item(NamedTuple):
    """The item of an encoding: the digest of its data, its number of embeddings, and its modality."""

    digest: str
    num_embeds: int
    modality: str


class HostPlanner:
    """Asks `HostTier` about every encoding that a step frees, and sends its decisions to the workers.

    1. The tier is asked after the step's decisions: an encoding that was found in it during the step stays there.
    2. An encoding counts as kept once a worker has confirmed it, by the ticket of its order. A worker that could not
       keep it, or does not know such orders, thus costs an encode and nothing else.
    3. A restored encoding stays in host memory, too, so that evicting it again copies nothing.
    4. Only the encoding of an item with the same data and size is restored: the tier drops one whose name another item
       has that is about to run. The encoding of an item without a digest is not kept.
    5. `forget` empties the tier, and nothing is kept that was encoded before it.

    Args:
        max_bytes: bound on host memory, in bytes; 0 turns the tier off.
        contents: the digests of items.
    """

    def __init__(self, max_bytes: int, contents: Contents) -> None:
        self.tier = HostTier(max_bytes)
        self.restored = 0
        self.decisions = dict.fromkeys(HostReason, 0)
        self.not_reused = dict.fromkeys(NotReused, 0)
        self._contents = contents
        self._manager: OmniEncoderCacheManager | None = None
        self._cost, self._embed_bytes = EncodeCost(), 1
        self._cached: dict[str, _Item | None] = {}  # mm_hash -> the item whose encoding the encoder cache has
        self._kept: dict[str, _Item] = {}  # the same for the tier
        self._drop: list[str] = []  # encodings that workers must still be told to drop
        self._rate = Rate(_START_SECONDS_PER_BYTE)
        self._tickets: dict[str, int] = {}  # mm_hash -> ticket, for all encodings in the tier
        self._last_ticket = 0
        self._there: set[str] = set()
        self._restore: list[str] = []

    def bind(self, manager: EncoderCacheManager, model_config: Any) -> None:
        """Give this planner access to the encodings that the encoder cache evicts."""
        if self.tier.max_bytes and isinstance(manager, OmniEncoderCacheManager):
            self._manager = manager
            self._embed_bytes = max(1, model_config.get_inputs_embeds_size() * model_config.dtype.itemsize)

    def has(self, mm_hash: str) -> bool:
        """Return whether the workers hold this encoding in host memory."""
        return mm_hash in self._there

    def look(self, feature: Any, num_embeds: int) -> None:
        """Drop an encoding that has the name of an item which is about to run, but is not its own (rule 4)."""
        mm_hash = feature.identifier
        kept = self._kept.get(mm_hash)
        if kept is None or mm_hash in self._restore:
            return
        digest = self._contents.of(feature)
        if digest is not None and kept == (digest, num_embeds, feature.modality):
            return
        self.not_reused[NotReused.UNKNOWN_CONTENT if digest is None else NotReused.OTHER_CONTENT] += 1
        self._give_up(mm_hash)
        self._drop.append(mm_hash)

    def allocated(self, feature: Any, num_embeds: int) -> None:
        """Record that the encoder cache has made room for the encoding of an item."""
        if self._manager is None:
            return
        mm_hash, digest = feature.identifier, self._contents.of(feature)
        if digest is None:
            self.not_reused[NotReused.UNKNOWN_CONTENT] += 1
        # of one that was evicted in this step, the worker still has the tensor: it is not known which one that is
        unclear = digest is None or mm_hash in self._manager.freed
        self._cached[mm_hash] = None if unclear else _Item(digest or "", num_embeds, feature.modality)

    def restore(self, mm_hash: str) -> bool:
        """Order the restore of an encoding for which the encoder cache has made room; False if it is not in host
        memory.
        """
        if not self.has(mm_hash):
            return False
        self.tier.hold(mm_hash)
        self._restore.append(mm_hash)
        self.restored += 1
        return True

    def take_orders(self, freed: Iterable[str]) -> HostOrders:
        """Return the orders for the workers that go with the step that frees ``freed`` (mm_hashes)."""
        if self._manager is None:
            return HostOrders()
        drop, self._drop = self._drop, []
        keep: dict[str, int] = {}
        for mm_hash in freed:
            item = self._cached.pop(mm_hash, None)
            if item is None:
                continue
            num_bytes = max(1, item.num_embeds * self._embed_bytes)
            encoding = Encoding(mm_hash, num_bytes, self._cost.seconds(item.modality, item.num_embeds))
            if self._kept.get(mm_hash, item) != item:
                self._give_up(mm_hash)
                drop.append(mm_hash)
            decision = self.tier.offer(encoding, self._rate.seconds(num_bytes))
            self.decisions[decision.reason] += 1
            for gone in decision.dropped:
                self._forget(gone)
                if keep.pop(gone, None) is None:
                    drop.append(gone)
            if decision.reason is HostReason.RESTORE_IS_QUICKER:
                self._last_ticket += 1
                keep[mm_hash] = self._tickets[mm_hash] = self._last_ticket
                self._kept[mm_hash] = item
        for mm_hash in self._restore:  # workers take steps in order: a later drop comes after this restore
            self.tier.release(mm_hash)
        # the request may have been preempted and the encoding evicted later in the step
        restore = tuple(mm_hash for mm_hash in self._restore if mm_hash in self._manager.cached)
        self._restore = []
        return HostOrders(tuple(drop), tuple(keep.items()), restore)

    def forget(self) -> None:
        """Empty the tier, and keep nothing that was encoded so far; the workers do the same."""
        self.tier = HostTier(self.tier.max_bytes)
        for state in (self._tickets, self._there, self._restore, self._cached, self._kept, self._drop):
            state.clear()

    def _give_up(self, mm_hash: str) -> None:
        self._forget(mm_hash)
        self.tier.drop(mm_hash)

    def _forget(self, mm_hash: str) -> None:
        del self._tickets[mm_hash], self._kept[mm_hash]
        self._there.discard(mm_hash)

    def take_report(self, report: HostReport) -> None:
        """Take over what a worker has kept and restored; results of orders that were taken back are ignored."""
        for ticket, (mm_hash, _) in report.kept.items():
            if self._tickets.get(mm_hash) == ticket:
                self._there.add(mm_hash)
        for ticket, mm_hash in report.lost.items():
            if self._tickets.get(mm_hash) == ticket:
                self._give_up(mm_hash)
        if report.embeds:
            # the scheduler can only guess how wide embeddings are: some encoders put several layers side by side
            num_bytes = sum(num_bytes for _, num_bytes in report.kept.values())
            self._embed_bytes = max(1, num_bytes // report.embeds)
        self._rate.observe(report.restored_bytes, report.restored_seconds)

    def take_encode_times(self, times: dict[str, tuple[int, float]]) -> None:
        """Learn the cost of encodes from timed ones: modality -> embeddings, seconds."""
        for modality, (num_embeds, seconds) in times.items():
            self._cost.observe(modality, num_embeds, seconds)

    def count_into(self, metrics: SchedulerMetrics) -> None:
        """Copy this planner's counts into ``metrics``."""
        metrics.encoder_tier_host = self.restored
        metrics.host_tier_bytes = self.tier.num_bytes
        metrics.kept_not_reused = {reason.value: number for reason, number in self.not_reused.items()}
        metrics.host_offers = {reason.value: self.decisions[reason] for reason in HostReason}
