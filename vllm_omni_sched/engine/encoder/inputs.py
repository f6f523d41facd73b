"""Encoder inputs of a step: vLLM decides on the items that overlap its tokens.

vLLM's own methods decide. They are shown fewer items: `_try_schedule_encoder_inputs` of every version walks or bisects
``request.mm_features`` and reports positions in it, and a list of items that *all* overlap the window is one on which
scan and bisect agree, sorted or not. Nothing here imports vLLM.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from vllm_omni_sched.engine.protocols import EncoderCache, Request, Scheduler
from vllm_omni_sched.items import FeatureList, ends_after, in_order
from vllm_omni_sched.monitor.counts import SchedulerMetrics

Inputs = tuple[Any, ...]
"""Answer of `_try_schedule_encoder_inputs`: ids to encode, number of tokens, budget left, and since 0.23 further lists
of ids.
"""


class DecidesInputs(Protocol):
    """Decides which items of a request are encoded in a step, and how many tokens that leaves."""

    def decide(
        self,
        scheduler: Any,
        ask: Callable[..., Inputs],
        request: Any,
        num_computed_tokens: int,
        num_new_tokens: int,
        encoder_compute_budget: int,
        shift_computed_tokens: int,
    ) -> Inputs:
        """Return the decision of ``ask``, which is vLLM's own method, on the items and tokens that it is shown."""


class EncoderInputs:
    """Shows vLLM the items that a decision depends on, and translates its answer.

    1. The first tokens of a prompt whose items are in order: vLLM's own search is exact, and it is asked as it is.
    2. No item ends after the computed tokens (a decode step): vLLM is asked about a chunk without tokens.
    3. Where vLLM's search would be linear, or wrong because items are nested or out of order, it is shown the items
       of the window alone, under local ids.
    4. A request that begins behind a prefix gets an index: items in it are sent without data, and may have to be sent
       again.

    Args:
        narrows: whether vLLM is shown windows (option ``windows``, no encoder-decoder model).
        native_windows: whether vLLM bisects items that are in order.
        running: vLLM's status of a request that runs.
        index: makes the items of a request a `FeatureList`.
        metrics: counts windows and items.
    """

    __slots__ = ("_index", "_metrics", "_narrows", "_native_windows", "_running", "num_indexed")

    def __init__(
        self,
        *,
        narrows: bool,
        native_windows: bool,
        running: object,
        index: Callable[[Any], bool],
        metrics: SchedulerMetrics,
    ) -> None:
        self._narrows = narrows
        self._native_windows = native_windows
        self._running = running
        self._index = index
        self._metrics = metrics
        self.num_indexed = 0  # requests whose items are a FeatureList

    def index(self, request: Request) -> bool:
        """Make the items of this request a `FeatureList`. Return False if they were in order already."""
        self.num_indexed += 1
        return self._index(request)

    def decide(
        self,
        scheduler: Scheduler,
        ask: Callable[..., Inputs],
        request: Request,
        num_computed_tokens: int,
        num_new_tokens: int,
        encoder_compute_budget: int,
        shift_computed_tokens: int,
    ) -> Inputs:
        """Return vLLM's decision on the items that overlap these tokens."""
        features = request.mm_features
        if type(features) is list:
            if not num_computed_tokens:
                self._metrics.windows_native += self._narrows
                return ask(request, 0, num_new_tokens, encoder_compute_budget, shift_computed_tokens)
            if request.status is not self._running:
                self.index(request)
                features = request.mm_features
        if self._narrows and not ends_after(features, num_computed_tokens):
            found = ask(request, num_computed_tokens, 0, encoder_compute_budget, shift_computed_tokens)
            return (found[0], num_new_tokens, *found[2:])
        if not self._narrows or (self._native_windows and in_order(features)):
            self._metrics.windows_native += self._narrows
            return ask(request, num_computed_tokens, num_new_tokens, encoder_compute_budget, shift_computed_tokens)
        end = num_computed_tokens + num_new_tokens + shift_computed_tokens
        ids = _as_indexed(features).spans.overlapping(num_computed_tokens, end)
        self._metrics.windows_narrowed += 1
        self._metrics.items_visited += len(ids)
        manager = scheduler.encoder_cache_manager
        scheduler.encoder_cache_manager = WindowedManager(manager)
        try:
            inputs, num_tokens, budget, *more = ask(
                WindowedRequest(request, ids),
                num_computed_tokens,
                num_new_tokens,
                encoder_compute_budget,
                shift_computed_tokens,
            )
        finally:
            scheduler.encoder_cache_manager = manager
        return ([ids[i] for i in inputs], num_tokens, budget, *([ids[i] for i in local] for local in more))


def _as_indexed(features: list[Any]) -> FeatureList:
    assert isinstance(features, FeatureList), "a list that vLLM cannot search was not indexed when its request came"
    return features


class WindowedRequest:
    """A view of ``request`` that has only the items ``ids``; all other attributes are the request's own."""

    def __init__(self, request: Request, ids: Sequence[int]) -> None:
        features = request.mm_features
        self.request = request
        self.ids = ids
        self.mm_features = [features[i] for i in ids]
        self.has_encoder_inputs = bool(ids)
        self.num_encoder_inputs = len(ids)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.request, name)

    def get_num_encoder_embeds(self, input_id: int) -> int:
        return self.request.get_num_encoder_embeds(self.ids[input_id])


class WindowedManager:
    """A view of ``manager`` that answers for a `WindowedRequest` with the request's own ids."""

    def __init__(self, manager: EncoderCache) -> None:
        self._manager = manager

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def check_and_update_cache(self, view: WindowedRequest, input_id: int) -> bool:
        return self._manager.check_and_update_cache(view.request, view.ids[input_id])

    def get_cached_num_encoder_embeds(self, view: WindowedRequest, input_id: int) -> int | None:
        return self._manager.get_cached_num_encoder_embeds(view.request, view.ids[input_id])

    def can_allocate(self, view: WindowedRequest, input_id: int, budget: int, num_embeds_to_schedule: int) -> bool:
        return self._manager.can_allocate(view.request, view.ids[input_id], budget, num_embeds_to_schedule)
