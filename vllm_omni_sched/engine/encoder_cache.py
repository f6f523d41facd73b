"""vLLM's encoder cache manager, with O(1) release of an item."""

from typing import Any

from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.request import Request

from vllm_omni_sched.compat import native_hash_refs

_NATIVE_REFS = native_hash_refs()


class OmniEncoderCacheManager(EncoderCacheManager):
    """Encoder cache manager that knows, per request, what it holds and how often.

    1. ``request_cached_ids[request]`` are the items that a request holds a
       reference for (in vLLM since 0.23; older versions search all items).
    2. ``request_hash_refs[request][mm_hash]`` counts them by content, so that the
       last use of a repeated item is recognised without a search (in vLLM since
       0.33; 0.29-0.32 scan the request's cached items for every one released).
    3. Every decision (hit, room, eviction order) is vLLM's own.

    Usable alone: ``--ec-manager-config '{"encoder_cache_manager_cls":
    "vllm_omni_sched.OmniEncoderCacheManager"}'``.

    Args:
        cache_size: capacity in encoder embeddings.
    """

    def __init__(self, cache_size: int) -> None:
        super().__init__(cache_size)
        if not hasattr(self, "request_cached_ids"):
            self.request_cached_ids: dict[str, set[int]] = {}
        if not _NATIVE_REFS:
            self.request_hash_refs: dict[str, dict[str, int]] = {}
        self.hits = 0
        self.misses = 0
        self.evictions = 0

    @classmethod
    def adopt(cls, manager: EncoderCacheManager) -> "OmniEncoderCacheManager":
        """A fresh manager of the same capacity as ``manager``, which must be unused."""
        return cls(manager.cache_size)

    def reset(self) -> None:
        super().reset()
        self.request_cached_ids.clear()
        self.request_hash_refs.clear()

    def check_and_update_cache(self, request: Request, input_id: int) -> bool:
        if _NATIVE_REFS:
            hit = super().check_and_update_cache(request, input_id)
        else:
            held = self.request_cached_ids.get(request.request_id)
            known = held is not None and input_id in held
            hit = super().check_and_update_cache(request, input_id)
            if hit and not known:
                self._add_reference(request, input_id)
        if hit:
            self.hits += 1
        else:
            self.misses += 1
        return hit

    def allocate(self, request: Request, input_id: int) -> None:
        if _NATIVE_REFS:
            super().allocate(request, input_id)
            return
        held = self.request_cached_ids.get(request.request_id)
        known = held is not None and input_id in held
        super().allocate(request, input_id)
        if not known:
            self._add_reference(request, input_id)

    def _add_reference(self, request: Request, input_id: int) -> None:
        request_id = request.request_id
        self.request_cached_ids.setdefault(request_id, set()).add(input_id)
        refs = self.request_hash_refs.setdefault(request_id, {})
        mm_hash = request.mm_features[input_id].identifier
        refs[mm_hash] = refs.get(mm_hash, 0) + 1

    def get_cached_input_ids(self, request: Request) -> set[int]:
        return self.request_cached_ids.get(request.request_id) or set()

    def free_encoder_input(self, request: Request, input_id: int) -> None:
        if _NATIVE_REFS:
            super().free_encoder_input(request, input_id)
            return
        mm_hash = request.mm_features[input_id].identifier
        if self._drop_reference(request.request_id, input_id, mm_hash):
            self._release(request.request_id, mm_hash, request.get_num_encoder_embeds(input_id))

    def _drop_reference(self, request_id: str, input_id: int, mm_hash: str) -> bool:
        """Forget one use; True when the request no longer uses that content at all."""
        held = self.request_cached_ids.get(request_id)
        if held is None or input_id not in held:
            return mm_hash not in self.request_hash_refs.get(request_id, ())
        held.remove(input_id)
        refs = self.request_hash_refs[request_id]
        left = refs[mm_hash] - 1
        if left:
            refs[mm_hash] = left
        else:
            del refs[mm_hash]
        if not held:
            del self.request_cached_ids[request_id]
            del self.request_hash_refs[request_id]
        return not left

    def _release(self, request_id: str, mm_hash: str, num_embeds: int) -> None:
        """The request's one reference to an entry ends; without any, it may be evicted."""
        users = self.cached.get(mm_hash)
        if not users:
            return
        users.discard(request_id)
        if not users:
            num_embeds = getattr(self, "num_embeds_by_hash", {}).get(mm_hash, num_embeds)
            self.freeable[mm_hash] = num_embeds
            self.num_freeable_slots += num_embeds

    def get_freed_mm_hashes(self) -> list[str]:
        freed = super().get_freed_mm_hashes()
        self.evictions += len(freed)
        return freed

    def validate(self) -> None:
        """Check the conservation laws of this cache; meant for tests and debugging, O(entries).

        Raises:
            AssertionError: the law that is broken, with its numbers.
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
            assert used + self.num_free_slots == self.cache_size, f"used {used} + free {self.num_free_slots} != {self.cache_size}"
        assert set(self.request_cached_ids) == set(self.request_hash_refs), "requests with items != requests with references"
        for request_id, held in self.request_cached_ids.items():
            refs = self.request_hash_refs[request_id]
            assert held and sum(refs.values()) == len(held) and all(n > 0 for n in refs.values()), (
                f"request {request_id}: {len(held)} items, references {refs}"
            )
        by_request = {(r, h) for r, refs in self.request_hash_refs.items() for h in refs if h in self.cached}
        by_entry = {(r, h) for h, users in self.cached.items() for r in users}
        assert by_request == by_entry, f"references by request and by entry differ: {by_request ^ by_entry}"
