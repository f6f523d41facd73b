"""Encoder inputs for engines in which vLLM's rules can keep a request from its next token for ever."""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Any

from vllm_omni_sched.engine.encoder.inputs import EncoderInputs, Inputs
from vllm_omni_sched.engine.protocols import Request
from vllm_omni_sched.logs import get_logger

logger = get_logger(__name__)


class UnstuckInputs(EncoderInputs):
    """Lets requests go on that vLLM would let wait for ever; all other decisions are vLLM's.

    1. An item that may not be cut (``disable_chunked_mm_input``) and does not fit into
       ``long_prefill_token_threshold`` passes whole: the threshold is raised for the next step. In vLLM 0.33 the
       request waits until no other is left.
    2. A drafter reads behind the chunk. So, in vLLM 0.30 to 0.32, a chunk ends one token before an item whose
       encoding has no room, and encodings are kept for one token more. If what a request itself holds leaves no room
       for its next item, it runs up to that item, and gives up the encodings of the items before it. Drafts are then
       made without the item.

    Args:
        threshold: vLLM's ``long_prefill_token_threshold``; 0 without one, or if items may be cut.
        whole_from_start: whether a chunk that begins with an item has to have all of it (vLLM 0.33).
        drafts_wait: whether there is a drafter for which vLLM waits (0.30 to 0.32).
        how: as for `EncoderInputs`.
    """

    __slots__ = ("_drafts_wait", "_needed", "_threshold", "_warned", "_whole_from_start")

    def __init__(self, *, threshold: int, whole_from_start: bool, drafts_wait: bool, **how: Any) -> None:
        super().__init__(**how)
        self._drafts_wait = drafts_wait
        self._threshold = threshold
        self._whole_from_start = whole_from_start
        self._needed = 0  # threshold of the next step
        self._warned = False

    def schedule(self, scheduler: Any, schedule: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the output of ``schedule``, in which items pass that the threshold has kept waiting."""
        settings, needed = scheduler.scheduler_config, self._needed
        if not needed:
            return schedule(*args, **kwargs)
        self._needed, threshold = 0, settings.long_prefill_token_threshold
        settings.long_prefill_token_threshold = max(threshold, needed)
        try:
            return schedule(*args, **kwargs)
        finally:
            settings.long_prefill_token_threshold = threshold

    def decide(
        self,
        scheduler: Any,
        ask: Callable[..., Inputs],
        request: Request,
        num_computed_tokens: int,
        num_new_tokens: int,
        encoder_compute_budget: int,
        shift_computed_tokens: int,
    ) -> Inputs:
        """Return vLLM's decision; another one if it is to wait for what will not come."""
        start = num_computed_tokens
        asked = (scheduler, ask, request, start, num_new_tokens, encoder_compute_budget)
        found = super().decide(*asked, shift_computed_tokens)
        if found[1] or not num_new_tokens:
            return found
        whole_from = start if self._whole_from_start else start + 1
        for input_id in _items_at(request.mm_features, start, start + shift_computed_tokens):
            offset, end = request.mm_features[input_id].mm_position.offset, _end(request.mm_features[input_id])
            if self._threshold and offset >= whole_from and end - start > max(self._threshold, num_new_tokens):
                self._raise_threshold(request, end - start)
            elif self._drafts_wait and _never_fits(scheduler, request, input_id, start - shift_computed_tokens):
                if offset > start:
                    return super().decide(*asked, 0)
                _give_up(scheduler, request, start)
                return super().decide(*asked, shift_computed_tokens)
        return found

    def _raise_threshold(self, request: Request, needed: int) -> None:
        self._needed = max(self._needed, needed)
        if not self._warned:
            self._warned = True
            logger.warning(
                "Request %s has an item that needs a step of %d tokens, because of --disable-chunked-mm-input; "
                "--long-prefill-token-threshold %d is not applied in that step. Raise it to the length of the "
                "longest item. Further items of this kind are not logged.",
                *(request.request_id, needed, self._threshold),
            )


def _never_fits(scheduler: Any, request: Request, input_id: int, freed_up_to: int) -> bool:
    """Return whether the encodings that a request holds, except those of items that end at or before ``freed_up_to``,
    leave no room for this one.
    """
    manager, features = scheduler.encoder_cache_manager, request.mm_features
    held = manager.get_cached_input_ids(request)
    if input_id in held:
        return False
    sizes = {features[i].identifier: request.get_num_encoder_embeds(i) for i in held if _end(features[i]) > freed_up_to}
    return bool(sum(sizes.values()) + request.get_num_encoder_embeds(input_id) > manager.cache_size)


def _give_up(scheduler: Any, request: Request, num_computed_tokens: int) -> None:
    """Free the encodings of the items that end at or before this token."""
    for input_id in list(scheduler.encoder_cache_manager.get_cached_input_ids(request)):
        if _end(request.mm_features[input_id]) <= num_computed_tokens:
            scheduler._free_encoder_input(request, input_id)


def _items_at(features: list[Any], first: int, last: int) -> Iterator[int]:
    """Yield the items, in order and not nested, that have tokens between these two, both included."""
    for input_id in range(bisect_right(features, first, key=_end), len(features)):
        if features[input_id].mm_position.offset > last:
            return
        yield input_id


def _end(feature: Any) -> int:
    position = feature.mm_position
    end: int = position.offset + position.length
    return end
