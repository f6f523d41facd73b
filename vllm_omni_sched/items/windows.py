"""Indexes with which a worker finds the items of a step, for feature lists that it did not build itself."""

from collections.abc import Iterable, Sequence
from typing import Any

from vllm_omni_sched.items.index import ItemIndex


class FeatureWindows:
    """Keeps an `ItemIndex` for each request's feature list, built once and extended as the list grows.

    A list is recognised by identity: another list under the same request id (the request was sent again) gets a new
    index.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[Sequence[Any], ItemIndex]] = {}

    def index_of(self, request_id: str, features: Sequence[Any]) -> ItemIndex:
        """Return the index of ``features``, updated in O(new items)."""
        known = self._known.get(request_id)
        if known is not None and known[0] is features and len(known[1]) <= len(features):
            index = known[1]
        else:
            index = ItemIndex()
            self._known[request_id] = (features, index)
        if len(index) < len(features):
            positions = [f.mm_position for f in features[len(index) :]]
            index.extend_columns([p.offset for p in positions], [p.offset + p.length for p in positions])
        return index

    def forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._known.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._known)
