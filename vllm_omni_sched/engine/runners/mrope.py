"""M-RoPE positions of a resumed session: vLLM computes those of the tail, which are put behind the known ones.

vLLM computes the positions of the whole prompt at every update of a session. Here its method is given the tail alone,
unless `why_not` finds a reason against it, and the result is shifted. Only sessions that arrive as deltas are
continued: their token array proves that the tokens before are unchanged (see `KnownPositions`).
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from vllm.logger import init_logger

from vllm_omni_sched import compat
from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.options import OmniSchedConfig, Toggle
from vllm_omni_sched.engine.runners.mrope_models import why_recomputed
from vllm_omni_sched.items.mrope import GrowingRows, KnownPositions, Tail
from vllm_omni_sched.logs import logger_name

logger = init_logger(logger_name(__name__))


def why_not(config: OmniSchedConfig, vllm_config: Any) -> str | None:
    """Return what prevents this engine from continuing positions, before any model is loaded; None if nothing does."""
    model_config = vllm_config.model_config
    if not model_config.uses_mrope:
        return "the model has no M-RoPE"
    multimodal = model_config.multimodal_config
    if multimodal is not None and multimodal.is_multimodal_pruning_enabled():
        return "video pruning changes positions after they were computed"
    if config.session_delta is Toggle.OFF or not compat.workers_take_deltas(vllm_config, config):
        return "sessions reach the workers in full, option 'session_delta' is off or cannot work"
    return None


def refuse_if_on(config: OmniSchedConfig, reason: str | None) -> None:
    """Refuse ``mrope_append`` if there is a reason against it.

    Raises:
        ConfigError: ``reason`` is given, and the option is ``on``.
    """
    if reason is not None and config.mrope_append is Toggle.ON:
        raise ConfigError(f"option 'mrope_append' is 'on' but cannot work: {reason}. Set it to 'auto' or 'off'")


def continues(config: OmniSchedConfig, vllm_config: Any, model: Any) -> bool:
    """Return whether positions of this loaded model are continued.

    Raises:
        ConfigError: they cannot be, and the option is ``on``.
    """
    if config.mrope_append is Toggle.OFF:
        return False
    reason = why_not(config, vllm_config) or why_recomputed(model)
    refuse_if_on(config, reason)
    logger.debug("mrope_append: %s", reason or "active")
    return reason is None


class _Session:
    """Positions of one session: how far they reach, where they are kept, and the view that the runner holds."""

    __slots__ = ("known", "rows", "view")

    def __init__(self, known: KnownPositions, view: torch.Tensor) -> None:
        self.known = known
        self.rows = GrowingRows(view.numpy())
        self.view = view

    def tail(self, req_state: Any) -> Tail | None:
        """Return what is new in the request; None if its positions are not ours any more, or cannot be continued."""
        if req_state.mrope_positions is not self.view:
            return None
        return self.known.tail(req_state.prompt_token_ids, req_state.mm_features)

    def extend(self, tail: Tail, positions: torch.Tensor, delta: int) -> None:
        """Append the positions of the tail, which were computed as if it were a prompt of its own."""
        self.view = torch.from_numpy(self.rows.append(positions.numpy(), self.known.next_position))
        self.known.extend(tail, delta + len(tail.tokens), positions.shape[1])


class SessionPositions:
    """Positions of the sessions of one V1 ``GPUModelRunner``, of which only the new part is computed."""

    def __init__(self) -> None:
        self._sessions: dict[str, _Session] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sessions

    def __len__(self) -> int:
        return len(self._sessions)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop the sessions among requests that have finished."""
        for request_id in request_ids if self._sessions else ():
            self._sessions.pop(request_id, None)

    def init(self, compute: Callable[[Any], None], req_state: Any) -> None:
        """Set the positions of a request; ``compute`` is vLLM's `_init_mrope_positions`."""
        tokens = req_state.prompt_token_ids
        if not isinstance(tokens, array):  # only a session's mirror keeps its tokens in an array
            compute(req_state)
            return
        session = self._sessions.pop(req_state.req_id, None)
        tail = session.tail(req_state) if session is not None else None
        if session is None or tail is None:
            compute(req_state)
            view = req_state.mrope_positions
            if not view.is_cpu:
                return
            next_position = req_state.mrope_position_delta + len(tokens)
            session = _Session(KnownPositions(tokens, req_state.mm_features, next_position, view.shape[1]), view)
        elif tail.tokens:
            features = req_state.mm_features
            req_state.prompt_token_ids, req_state.mm_features = tail.tokens, tail.items
            try:
                compute(req_state)
            finally:
                req_state.prompt_token_ids, req_state.mm_features = tokens, features
            session.extend(tail, req_state.mrope_positions, req_state.mrope_position_delta)
            req_state.mrope_positions = session.view
            req_state.mrope_position_delta = session.known.next_position - len(tokens)
        self._sessions[req_state.req_id] = session


class _ShiftedWrites:
    """Stands in for a ``StagedWriteTensor``: shifts writes behind the known positions, and continues their values."""

    def __init__(self, writes: Any, column: int, plus: int) -> None:
        self._writes = writes
        self._column = column
        self._plus = plus
        self.num_columns = 0

    def stage_write(self, index: int, start: int, x: Sequence[int]) -> None:
        self.num_columns = max(self.num_columns, start + len(x))
        moved = [position + self._plus for position in x] if self._plus else x
        self._writes.stage_write(index, start + self._column, moved)


class RowPositions:
    """Positions of sessions in the rows of one V2 ``RopeState``.

    V2 drops and re-adds a resumed request, which then gets the row it had. Every write to a row passes here, so that
    it is known whether the row still holds a session's positions.
    """

    def __init__(self) -> None:
        self.rows: dict[int, KnownPositions] = {}

    def init(
        self,
        state: Any,
        compute: Callable[[int, Any, Any, list[Any]], None],
        req_idx: int,
        model: Any,
        prefill_token_ids: Any,
        mm_features: list[Any],
    ) -> None:
        """Set the positions of a row of ``state``; ``compute`` is vLLM's `init_prefill_positions`."""

        def write(tokens: Any, features: list[Any], column: int, plus: int) -> int:
            """Call vLLM's own method with its writes shifted; return how many columns it wrote."""
            writes = state.prefill_positions
            state.prefill_positions = shifted = _ShiftedWrites(writes, column, plus)
            try:
                compute(req_idx, model, tokens, features)
            finally:
                state.prefill_positions = writes
            return shifted.num_columns

        known = self.rows.pop(req_idx, None)
        if not isinstance(prefill_token_ids, array):  # only a session's mirror keeps its tokens in an array
            compute(req_idx, model, prefill_token_ids, mm_features)
            return
        tail = known.tail(prefill_token_ids, mm_features) if known is not None else None
        if known is None or tail is None:
            written = write(prefill_token_ids, mm_features, 0, 0)
            next_position = int(state.prefill_delta.np[req_idx]) + len(prefill_token_ids)
            known = KnownPositions(prefill_token_ids, mm_features, next_position, written)
        elif tail.tokens:
            written = write(tail.tokens, tail.items, known.num_tokens, known.next_position)
            known.extend(tail, int(state.prefill_delta.np[req_idx]) + len(tail.tokens), written)
            state.prefill_delta.np[req_idx] = known.next_position - len(prefill_token_ids)
        self.rows[req_idx] = known
