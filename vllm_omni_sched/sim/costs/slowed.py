"""Scale an engine's costs to a device of another speed."""

from vllm_omni_sched.sim.costs.base import EngineCosts
from vllm_omni_sched.sim.work import Request


class SlowedCosts:
    """Costs of an engine on a device that is ``speed`` times as fast; those of the front end stay."""

    def __init__(self, costs: EngineCosts, speed: float) -> None:
        self._costs, self._speed = costs, speed
        self.source, self.kv_tokens = costs.source, costs.kv_tokens

    def step_seconds(
        self, decodes: int, context_tokens: int, prefill_tokens: int, prefill_pairs: float, share: float = 1.0
    ) -> float:
        seconds = self._costs.step_seconds(decodes, context_tokens, prefill_tokens, prefill_pairs, share)
        return seconds / self._speed

    def operations_seconds(
        self, decodes: int, context_tokens: int, prefill_tokens: int, prefill_pairs: float
    ) -> float | None:
        seconds = self._costs.operations_seconds(decodes, context_tokens, prefill_tokens, prefill_pairs)
        return None if seconds is None else seconds / self._speed

    def encode_seconds(self, modality: str, embeds: int, items: int = 1, share: float = 1.0) -> float:
        return self._costs.encode_seconds(modality, embeds, items, share) / self._speed

    def lane_seconds(
        self, modality: str, embeds: int, items: int = 1, share: float = 1.0, beside: bool = False
    ) -> float:
        return self._costs.lane_seconds(modality, embeds, items, share, beside) / self._speed

    def in_lane(self, share: float) -> float:
        return self._costs.in_lane(share)

    def frontend_seconds(self, request: Request) -> float:
        return self._costs.frontend_seconds(request)

    @property
    def answer_seconds(self) -> float:
        return self._costs.answer_seconds
