"""Encoder inputs of a step, decided by vLLM on only the items that overlap the step's tokens."""

from collections.abc import Callable
from typing import Any

from vllm.v1.request import Request, RequestStatus

from vllm_omni_sched.engine.narrow import WindowedManager, WindowedRequest
from vllm_omni_sched.items import ends_after, in_order
from vllm_omni_sched.monitor.counts import SchedulerMetrics


class WindowedInputsMixin:
    """Narrows what vLLM's ``_try_schedule_encoder_inputs`` sees, and translates its answer."""

    _omni_windows: bool
    _omni_native_windows: bool
    omni_metrics: SchedulerMetrics
    encoder_cache_manager: Any
    _omni_index: Callable[[Request], bool]

    def _omni_inputs(
        self,
        request: Request,
        num_computed_tokens: int,
        num_new_tokens: int,
        encoder_compute_budget: int,
        shift_computed_tokens: int,
    ) -> tuple[Any, ...]:
        """Return vLLM's decision on the items that overlap these tokens."""
        if num_computed_tokens and type(request.mm_features) is list and request.status is not RequestStatus.RUNNING:
            # The request begins behind a prefix: items in it are sent without data, and may have to be sent again.
            self._omni_index(request)
        features = request.mm_features
        narrow = self._omni_windows
        if narrow and not ends_after(features, num_computed_tokens):
            # All items lie before this chunk (a decode step): take vLLM's answer for a chunk without tokens.
            nothing, _, budget, *more = super()._try_schedule_encoder_inputs(
                request, num_computed_tokens, 0, encoder_compute_budget, shift_computed_tokens
            )
            return (nothing, num_new_tokens, budget, *more)
        if not narrow or (self._omni_native_windows and in_order(features)):
            self.omni_metrics.windows_native += narrow
            return super()._try_schedule_encoder_inputs(
                request, num_computed_tokens, num_new_tokens, encoder_compute_budget, shift_computed_tokens
            )
        ids = features.spans.overlapping(
            num_computed_tokens, num_computed_tokens + num_new_tokens + shift_computed_tokens
        )
        self.omni_metrics.windows_narrowed += 1
        self.omni_metrics.items_visited += len(ids)
        manager: Any = self.encoder_cache_manager
        windowed: Any = WindowedManager(manager)
        self.encoder_cache_manager = windowed
        try:
            inputs, num_tokens, budget, *more = super()._try_schedule_encoder_inputs(
                WindowedRequest(request, ids),
                num_computed_tokens,
                num_new_tokens,
                encoder_compute_budget,
                shift_computed_tokens,
            )
        finally:
            self.encoder_cache_manager = manager
        return ([ids[i] for i in inputs], num_tokens, budget, *([ids[i] for i in local] for local in more))
