"""Items that no request has taken to the engine core yet: their data goes along with the next request that has them.

vLLM's API process counts an item as held by the engine core once a request with it is prepared, and leaves its data out
of later requests. If the first request is refused or its client leaves before it is sent, the later ones fail.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from vllm_omni_sched import compat
from vllm_omni_sched.imports import wrap_once

_unsent: weakref.WeakKeyDictionary[Any, dict[str, weakref.ref[Any]]] = weakref.WeakKeyDictionary()
"""By cache of the API process: items by hash, each alive as long as a request that was not sent has its data."""

_request = threading.local()
"""`.hashes`: the items of the request that this thread prepares, whose data is in the request already."""


class AbandonedItemError(Exception):
    """The requests with the data of an item ended unsent, after this request had found the item in the cache."""


def attach() -> None:
    """Hook into the engines of this process, if this vLLM leaves out what it has sent before; idempotent."""
    cache, renderer = compat.sender_cache_class(), compat.mm_renderer_class()
    if cache is None or renderer is None:
        return
    wrap_once(cache, "get_and_update_item", _with_data_until_sent)
    wrap_once(renderer, "_process_multimodal", _without_abandoned_items)
    for client, name in compat.request_senders():
        wrap_once(client, name, _marks_sent_async if name.endswith("async") else _marks_sent)


def _with_data_until_sent(get_and_update_item: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(self: Any, mm_item: Any, mm_hash: str) -> Any:
        unsent = _unsent.setdefault(self, {})
        ref = unsent.get(mm_hash)
        held = None if ref is None else ref()
        if ref is not None and held is None:
            if mm_item is None:
                raise AbandonedItemError(mm_hash)
            self.invalidate(mm_hash)
        item, updates = get_and_update_item(self, mm_item, mm_hash)
        item = held if item is None else item
        if item is None:
            return None, updates
        unsent[mm_hash] = weakref.ref(item)
        hashes: set[str] = getattr(_request, "hashes", set())
        said = mm_hash in hashes
        hashes.add(mm_hash)
        return (None if said else item), updates

    return wrapper


def _without_abandoned_items(process: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        while True:
            _forget_abandoned(self.mm_processor_cache)
            _request.hashes = set()
            try:
                return process(self, *args, **kwargs)
            except AbandonedItemError:
                continue  # its own data is still at hand
            finally:
                del _request.hashes

    return wrapper


def _forget_abandoned(cache: Any) -> None:
    unsent = _unsent.get(cache, {}) if cache is not None else {}
    for mm_hash, ref in list(unsent.items()):
        if ref() is None and unsent.get(mm_hash) is ref:
            cache.invalidate(mm_hash)
            unsent.pop(mm_hash, None)


def _marks_sent(add_request: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        result = add_request(self, request, *args, **kwargs)
        _sent(request)
        return result

    return wrapper


def _marks_sent_async(add_request: Callable[..., Any]) -> Callable[..., Any]:
    async def wrapper(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        result = await add_request(self, request, *args, **kwargs)
        _sent(request)
        return result

    return wrapper


def _sent(request: Any) -> None:
    mark_sent(
        feature.mm_hash or feature.identifier for feature in request.mm_features or () if feature.data is not None
    )


def mark_sent(hashes: Iterable[str]) -> None:
    """Record that a request on its way to the engine core has the data of these items."""
    for mm_hash in hashes:
        for unsent in list(_unsent.values()):
            unsent.pop(mm_hash, None)
