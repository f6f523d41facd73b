"""Encoder inputs of a step: vLLM decides on the items that overlap its tokens, and frees those that it has passed.

vLLM's own methods decide. They are shown fewer items: `_try_schedule_encoder_inputs` of every version walks or bisects
``request.mm_features`` and reports positions in it, and a list of items that *all* overlap the window is one on which
scan and bisect agree, sorted or not. Nothing here imports vLLM.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from vllm_omni_sched.engine.protocols import EncoderCache, Request, Scheduler
from vllm_omni_sched.items import FeatureList, ends_after, in_order
from vllm_omni_sched.monitor.counts import SchedulerMetrics

LEAST_HELD = 8
"""Least number of encodings held by a request for which bisection is cheaper than vLLM's loop."""

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
        frees_at_once: whether encodings may leave the encoder cache together: its manager is an
            `OmniEncoderCacheManager`, and nobody is notified of single items.
        metrics: counts windows and items.
    """

    __slots__ = ("_frees_at_once", "_index", "_metrics", "_narrows", "_native_windows", "_running", "num_indexed")

    def __init__(
        self,
        *,
        narrows: bool,
        native_windows: bool,
        running: object,
        index: Callable[[Any], bool],
        frees_at_once: bool,
        metrics: SchedulerMetrics,
    ) -> None:
        self._frees_at_once = frees_at_once
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

    def free_passed(
        self, scheduler: Scheduler, ask: Callable[[Any], None], request: Request, held: Collection[int]
    ) -> None:
        """Free the same encodings after a step as vLLM, at a third of its cost per item.

        1. vLLM's `_free_encoder_inputs` (``ask``) frees every encoding whose item ends before some position. That
           position differs between versions, so vLLM is asked about single items.
        2. Consecutive items end in their order. The first kept item is found by bisection, nearly always among the
           last two.
        3. The items before it leave the encoder cache in vLLM's order, by one call of its manager.

        Args:
            held: items of the request that are in the encoder cache, `LEAST_HELD` or more.
        """
        if not self._frees_at_once or not in_order(request.mm_features):
            ask(request)
            return
        manager = scheduler.encoder_cache_manager
        question = scheduler.encoder_cache_manager = _Question()

        def is_kept(input_id: int) -> bool:
            question.asked, question.freed = input_id, False
            ask(request)
            return not question.freed

        try:
            ids = sorted(held)
            num_freed = len(ids)
            while num_freed > len(ids) - 2 and is_kept(ids[num_freed - 1]):
                num_freed -= 1
            if num_freed == len(ids) - 2:
                num_freed = bisect_left(ids, True, hi=num_freed, key=is_kept)
        finally:
            scheduler.encoder_cache_manager = manager
        if num_freed == len(ids):
            manager.free(request)
        elif num_freed:
            manager.free_inputs(request, [i for i in held if i < ids[num_freed]])


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


class _Question:
    """Stands in for the manager while vLLM is asked about one encoding; records the answer and frees nothing."""

    __slots__ = ("asked", "freed")

    def __init__(self) -> None:
        self.asked = 0
        self.freed = False

    def get_cached_input_ids(self, request: object) -> tuple[int, ...]:
        return (self.asked,)

    def free_encoder_input(self, request: object, input_id: int) -> None:
        self.freed = True
