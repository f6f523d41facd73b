"""Views of a request and of a cache manager that show only some items, under local ids.

With these, vLLM's own `_try_schedule_encoder_inputs` decides on a window of items
without being copied: every version walks or bisects ``request.mm_features`` and
reports positions in it, and a list of items that *all* overlap the window is one
on which scan and bisect agree, sorted or not.
"""

from collections.abc import Sequence
from typing import Any


class WindowedRequest:
    """A view of ``request`` that has only the items ``ids``; all other attributes are the request's own."""

    def __init__(self, request: Any, ids: Sequence[int]) -> None:
        features = request.mm_features
        self._request = request
        self.ids = ids
        self.mm_features = [features[i] for i in ids]
        self.has_encoder_inputs = bool(ids)
        self.num_encoder_inputs = len(ids)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)

    def get_num_encoder_embeds(self, input_id: int) -> int:
        embeds: int = self._request.get_num_encoder_embeds(self.ids[input_id])
        return embeds


class WindowedManager:
    """A view of ``manager`` that answers for a `WindowedRequest` with the request's own ids."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def check_and_update_cache(self, view: WindowedRequest, input_id: int) -> bool:
        hit: bool = self._manager.check_and_update_cache(view._request, view.ids[input_id])
        return hit

    def get_cached_num_encoder_embeds(self, view: WindowedRequest, input_id: int) -> int | None:
        embeds: int | None = self._manager.get_cached_num_encoder_embeds(view._request, view.ids[input_id])
        return embeds

    def can_allocate(self, view: WindowedRequest, input_id: int, budget: int, num_embeds_to_schedule: int) -> bool:
        room: bool = self._manager.can_allocate(view._request, view.ids[input_id], budget, num_embeds_to_schedule)
        return room
