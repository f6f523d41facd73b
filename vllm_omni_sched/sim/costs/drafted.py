"""Cost the decode steps of an engine that verifies draft tokens."""

from vllm_omni_sched.sim.costs.base import EngineCosts
from vllm_omni_sched.sim.work import Request


class DraftedCosts:
    """Costs of an engine with speculative decoding: those of a step that verifies the draft, and of making the draft.

    Args:
        verifying: costs of steps that compute the draft tokens as well.
        alone: costs of the same engine without a draft.
        draft: the part of a decode step's seconds without a draft that making the draft takes.
    """

    def __init__(self, verifying: EngineCosts, alone: EngineCosts, draft: float) -> None:
        self._verifying, self._alone, self._draft = verifying, alone, draft
        self.source, self.kv_tokens = verifying.source, verifying.kv_tokens

    def step_seconds(
        self, decodes: int, context_tokens: int, prefill_tokens: int, prefill_pairs: float, share: float = 1.0
    ) -> float:
        seconds = self._verifying.step_seconds(decodes, context_tokens, prefill_tokens, prefill_pairs, share)
        if decodes and self._draft:
            seconds += self._draft * self._alone.step_seconds(decodes, context_tokens, 0, 0.0, share)
        return seconds

    def decode_line(self, decodes: int, context_tokens: int) -> tuple[float, float, int]:
        fixed, slope, limit = self._verifying.decode_line(decodes, context_tokens)
        if not self._draft:
            return fixed, slope, limit
        more, steeper, other = self._alone.decode_line(decodes, context_tokens)
        return fixed + self._draft * more, slope + self._draft * steeper, min(limit, other)

    def operations_seconds(
        self, decodes: int, context_tokens: int, prefill_tokens: int, prefill_pairs: float
    ) -> float | None:
        return self._verifying.operations_seconds(decodes, context_tokens, prefill_tokens, prefill_pairs)

    def encode_seconds(self, modality: str, embeds: int, items: int = 1, share: float = 1.0) -> float:
        return self._verifying.encode_seconds(modality, embeds, items, share)

    def lane_seconds(
        self, modality: str, embeds: int, items: int = 1, share: float = 1.0, beside: bool = False
    ) -> float:
        return self._verifying.lane_seconds(modality, embeds, items, share, beside)

    def in_lane(self, share: float) -> float:
        return self._verifying.in_lane(share)

    def frontend_seconds(self, request: Request) -> float:
        return self._verifying.frontend_seconds(request)

    @property
    def answer_seconds(self) -> float:
        return self._verifying.answer_seconds
