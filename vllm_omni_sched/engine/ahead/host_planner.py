"""Scheduler half of the host tier: decides which evicted encodings workers keep, and which are restored."""

from collections.abc import Iterable

from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

from vllm_omni_sched.engine.ahead.host_messages import HostOrders, HostReport
from vllm_omni_sched.engine.encoder.worth import WorthEncoderCacheManager
from vllm_omni_sched.monitor.counts import SchedulerMetrics
from vllm_omni_sched.resource.engine.host_tier import HostReason, HostTier
from vllm_omni_sched.resource.rate import Rate

_START_SECONDS_PER_BYTE = 1e-9  # 1 GB/s, slower than any bus: until a restore was timed, few encodings are kept in vain


class HostPlanner:
    """Asks `HostTier` about every encoding that a step frees, and sends its decisions to the workers.

    1. The tier is asked after the step's decisions: an encoding that was found in it during the step stays there.
    2. An encoding counts as kept once a worker has confirmed it, by the ticket of its order. A worker that could not
       keep it, or does not know such orders, thus costs an encode and nothing else.
    3. A restored encoding stays in host memory, too, so that evicting it again copies nothing.
    4. A reset of the encoder cache empties the tier.

    Args:
        max_bytes: bound on host memory, in bytes; 0 turns the tier off.
    """

    def __init__(self, max_bytes: int) -> None:
        self.tier = HostTier(max_bytes)
        self.restored = 0
        self.decisions = dict.fromkeys(HostReason, 0)
        self._manager: WorthEncoderCacheManager | None = None
        self._num_resets = 0
        self._rate = Rate(_START_SECONDS_PER_BYTE)
        self._tickets: dict[str, int] = {}  # mm_hash -> ticket, for all encodings in the tier
        self._last_ticket = 0
        self._there: set[str] = set()
        self._restore: list[str] = []

    def bind(self, manager: EncoderCacheManager) -> None:
        """Give this planner access to the encodings that the encoder cache evicts."""
        self._manager = manager if isinstance(manager, WorthEncoderCacheManager) else None
        if self._manager is not None and self.tier.max_bytes:
            self._manager.tells_evicted = True

    def has(self, mm_hash: str) -> bool:
        """Return whether the workers hold this encoding in host memory."""
        return mm_hash in self._there and not self._was_reset

    @property
    def _was_reset(self) -> bool:
        return self._manager is not None and self._manager.num_resets != self._num_resets

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

    @property
    def has_orders(self) -> bool:
        """Return whether workers must still be told to drop encodings."""
        return bool(self._tickets) and self._was_reset

    def take_orders(self, freed: Iterable[str]) -> HostOrders:
        """Return the orders for the workers that go with the step that frees ``freed`` (mm_hashes)."""
        if self._manager is None:
            return HostOrders()
        drop = list(self._forget_all()) if self._was_reset else []
        evicted = self._manager.take_evicted()
        keep: dict[str, int] = {}
        for encoding in (evicted[mm_hash] for mm_hash in freed if mm_hash in evicted):
            mm_hash = encoding.mm_hash
            decision = self.tier.offer(encoding, self._rate.seconds(encoding.num_bytes))
            self.decisions[decision.reason] += 1
            for gone in decision.dropped:
                self._forget(gone)
                if keep.pop(gone, None) is None:
                    drop.append(gone)
            if decision.reason is HostReason.RESTORE_IS_QUICKER:
                self._last_ticket += 1
                keep[mm_hash] = self._tickets[mm_hash] = self._last_ticket
        for mm_hash in self._restore:  # workers take steps in order: a later drop comes after this restore
            self.tier.release(mm_hash)
        # the request may have been preempted and the encoding evicted later in the step
        restore = tuple(mm_hash for mm_hash in self._restore if mm_hash in self._manager.cached)
        self._restore = []
        return HostOrders(tuple(drop), tuple(keep.items()), restore)

    def _forget_all(self) -> Iterable[str]:
        assert self._manager is not None
        gone = tuple(self._tickets)
        self.tier = HostTier(self.tier.max_bytes)
        self._tickets, self._there, self._restore = {}, set(), []
        self._num_resets = self._manager.num_resets
        return gone

    def _forget(self, mm_hash: str) -> None:
        del self._tickets[mm_hash]
        self._there.discard(mm_hash)

    def take_report(self, report: HostReport) -> None:
        """Take over what a worker has kept and restored; results of orders that were taken back are ignored."""
        for ticket, (mm_hash, _) in report.kept.items():
            if self._tickets.get(mm_hash) == ticket:
                self._there.add(mm_hash)
        for ticket, mm_hash in report.lost.items():
            if self._tickets.get(mm_hash) == ticket:
                self._forget(mm_hash)
                self.tier.drop(mm_hash)
        if report.embeds and self._manager is not None:
            # the scheduler can only guess how wide embeddings are: some encoders put several layers side by side
            num_bytes = sum(num_bytes for _, num_bytes in report.kept.values())
            self._manager.embed_bytes = max(1, num_bytes // report.embeds)
        self._rate.observe(report.restored_bytes, report.restored_seconds)

    def take_encode_times(self, times: dict[str, tuple[int, float]]) -> None:
        """Learn the cost of encodes from timed ones: modality -> embeddings, seconds."""
        if self._manager is not None:
            for modality, (num_embeds, seconds) in times.items():
                self._manager.cost.observe(modality, num_embeds, seconds)

    def count_into(self, metrics: SchedulerMetrics) -> None:
        """Copy this planner's counts into ``metrics``."""
        metrics.encoder_tier_host = self.restored
        metrics.host_tier_bytes = self.tier.num_bytes
        metrics.host_offers = {reason.value: self.decisions[reason] for reason in HostReason}
