"""vLLM's encoder cache manager, with release of an item in constant time."""

from typing import Any

from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.request import Request

from vllm_omni_sched.compat import native_hash_refs, native_request_ids
from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.monitor.counts import SchedulerMetrics

_NATIVE_REFS = native_hash_refs()


class _IndexingManager(EncoderCacheManager):
    """Keeps ``request_cached_ids`` on a vLLM before 0.23, which searches all items of a request instead."""

    def __init__(self, cache_size: int) -> None:
        super().__init__(cache_size)
        self.request_cached_ids: dict[str, set[int]] = {}

    def reset(self) -> None:
        super().reset()
        self.request_cached_ids.clear()

    def check_and_update_cache(self, request: Request, input_id: int) -> bool:
        hit = super().check_and_update_cache(request, input_id)
        if hit:
            self.request_cached_ids.setdefault(request.request_id, set()).add(input_id)
        return hit

    def allocate(self, request: Request, input_id: int) -> None:
        super().allocate(request, input_id)
        self.request_cached_ids.setdefault(request.request_id, set()).add(input_id)

    def get_cached_input_ids(self, request: Request) -> set[int]:
        return self.request_cached_ids.get(request.request_id, set())


class OmniEncoderCacheManager(EncoderCacheManager if native_request_ids() else _IndexingManager):  # type: ignore[misc]
    """Encoder cache manager that indexes, per request, its cached items and how often each is used.

    1. ``request_cached_ids[request]`` are the items that a request holds a
       reference for (in vLLM since 0.23; older versions search all items).
    2. ``references(request)`` counts them by content, so that the last use of a
       repeated item is recognised without a search (in vLLM since 0.33; 0.29-0.32
       scan the request's cached items for every one released). Nearly all counts
       are 1, so only the uses beyond the first are stored.
    3. Every decision (hit, room, eviction order) is vLLM's own. Items are released by vLLM's loops, one by one:
       the order of their release, and so of their eviction, is that of a set, and depends on every change of it.

    Usable alone: ``--ec-manager-config '{"encoder_cache_manager_cls":
    "vllm_omni_sched.OmniEncoderCacheManager"}'``.

    Args:
        cache_size: capacity in encoder embeddings.
    """

    def __init__(self, cache_size: int) -> None:
        super().__init__(cache_size)
        # request id -> mm_hash -> uses beyond the first; vLLM 0.33+ keeps request_hash_refs itself.
        self._repeats: dict[str, dict[str, int]] = {}
        self.hits = 0
        self.misses = 0
        self.evictions = 0
        self.taken = 0  # hits of a request that did not hold the entry yet
        self._gone = 0  # entries that are no longer cached, for any reason

    @classmethod
    def adopt(cls, manager: EncoderCacheManager) -> "OmniEncoderCacheManager":
        """Return a fresh manager of the same capacity as ``manager``, which must be unused."""
        return cls(manager.cache_size)

    @property
    def allocated(self) -> int:
        """Return the number of entries made so far, derived from the entries present and gone instead of counted one by
        one.
        """
        return len(self.cached) + len(self.freed) + self._gone

    def reset(self) -> None:
        self._gone += len(self.cached) + len(self.freed)
        super().reset()
        self._repeats.clear()

    def references(self, request_id: str) -> dict[str, int]:
        """Return the number of the request's cached items by content (mm_hash)."""
        if _NATIVE_REFS:
            return dict(self.request_hash_refs.get(request_id, {}))
        repeats = self._repeats.get(request_id, {})
        return {h: 1 + repeats.get(h, 0) for h, users in self.cached.items() if request_id in users}

    def check_and_update_cache(self, request: Request, input_id: int) -> bool:
        mm_hash = request.mm_features[input_id].identifier
        if mm_hash not in self.cached:
            self.misses += 1
            return False
        self.hits += 1
        users = self.cached[mm_hash]
        request_id = request.request_id
        self.taken += request_id not in users
        if not _NATIVE_REFS and request_id in users and input_id not in self.request_cached_ids.get(request_id, ()):
            repeats = self._repeats.setdefault(request_id, {})
            repeats[mm_hash] = repeats.get(mm_hash, 0) + 1
        return super().check_and_update_cache(request, input_id)

    if not _NATIVE_REFS:

        def free_encoder_input(self, request: Request, input_id: int) -> None:
            request_id = request.request_id
            mm_hash = request.mm_features[input_id].identifier
            users = self.cached.get(mm_hash)
            held = self.request_cached_ids.get(request_id)
            if held is not None and input_id in held:
                held.remove(input_id)
                if not held:
                    del self.request_cached_ids[request_id]
                if self._is_repeat(request_id, mm_hash):
                    return
            elif held and users and request_id in users:
                return
            if users:
                users.discard(request_id)
                if not users:
                    num_embeds = request.get_num_encoder_embeds(input_id)
                    self.freeable[mm_hash] = num_embeds
                    self.num_freeable_slots += num_embeds

    def _is_repeat(self, request_id: str, mm_hash: str) -> bool:
        """Take off one use of a content by a request; return False if it was the last one."""
        repeats = self._repeats.get(request_id)
        if repeats is None or mm_hash not in repeats:
            return False
        left = repeats[mm_hash] - 1
        if left:
            repeats[mm_hash] = left
        else:
            del repeats[mm_hash]
            if not repeats:
                del self._repeats[request_id]
        return True

    def get_freed_mm_hashes(self) -> list[str]:
        if not self.freed:
            return []
        self._gone += len(self.freed)
        freed: list[str] = super().get_freed_mm_hashes()
        self.evictions += len(freed)
        return freed

    def count_into(self, metrics: SchedulerMetrics) -> None:
        """Copy counts into ``metrics``; without encode-ahead, every item that is not cached is encoded in the step."""
        metrics.encoder_cache_hits = self.hits
        metrics.encoder_cache_misses = self.misses
        metrics.encoder_evictions = self.evictions
        metrics.encoder_tier_device = self.taken
        metrics.encoder_tier_miss = self.allocated

    def validate(self) -> None:
        """Check the invariants of this cache; meant for tests and debugging, O(entries).

        Raises:
            AssertionError: names the invariant that is broken, with its numbers.
        """
        freeable = sum(self.freeable.values())
        assert self.num_freeable_slots == self.num_free_slots + freeable, (
            f"freeable slots {self.num_freeable_slots} != free {self.num_free_slots} + evictable {freeable}"
        )
        unused = {h for h, users in self.cached.items() if not users}
        assert unused == set(self.freeable), f"unreferenced entries {unused} != freeable {set(self.freeable)}"
        assert 0 <= self.num_free_slots <= self.num_freeable_slots <= self.cache_size
        sizes: dict[str, Any] | None = getattr(self, "num_embeds_by_hash", None)
        if sizes is not None:
            assert set(sizes) == set(self.cached), "sizes and entries name different contents"
            used = sum(sizes.values())
            assert used + self.num_free_slots == self.cache_size, (
                f"used {used} + free {self.num_free_slots} != {self.cache_size}"
            )
        by_entry: dict[str, int] = {}
        for users in self.cached.values():
            for request_id in users:
                by_entry[request_id] = by_entry.get(request_id, 0) + 1
        assert set(by_entry) == set(self.request_cached_ids), "requests with references != requests with cached items"
        assert set(self._repeats) <= set(by_entry), "repeats of a request that holds nothing"
        for request_id, held in self.request_cached_ids.items():
            uses = sum(self.references(request_id).values())
            assert uses == len(held), f"request {request_id}: {len(held)} cached items, {uses} uses"


def refuse_encoder_decoder(config: OmniSchedConfig, model_config: Any) -> None:
    """Refuse a host tier for models whose encodings vLLM does not keep in its encoder cache.

    Raises:
        ConfigError: there is to be one, and this is an encoder-decoder model.
    """
    if model_config.is_encoder_decoder and config.encoder_cache_host_bytes:
        raise ConfigError(
            "option 'encoder_cache_host_bytes' cannot be on here, because this is an encoder-decoder model: its "
            "encoder's output goes into the KV cache of its decoder, and is evicted with the request. Leave "
            "'encoder_cache_host_bytes' out"
        )


def manager_for(manager: EncoderCacheManager, config: OmniSchedConfig, model_config: Any) -> EncoderCacheManager:
    """Return our encoder cache manager in place of the unused ``manager``, or ``manager`` if the operator named it.

    Raises:
        ConfigError: a host tier needs our manager, but the operator has named another one, or the model is an
            encoder-decoder model.
    """
    refuse_encoder_decoder(config, model_config)
    if type(manager) is EncoderCacheManager:
        return OmniEncoderCacheManager.adopt(manager)
    if config.encoder_cache_host_bytes and not isinstance(manager, OmniEncoderCacheManager):
        raise ConfigError(
            "option 'encoder_cache_host_bytes' needs the encoder cache manager of vllm-omni-sched, not "
            f"{type(manager).__name__}: leave 'encoder_cache_host_bytes' out, or take encoder_cache_manager_cls out of "
            "--ec-manager-config"
        )
    return manager
