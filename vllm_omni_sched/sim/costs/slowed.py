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
        """Return the seconds of a step of the LLM."""
        seconds = self._costs.step_seconds(decodes, context_tokens, prefill_tokens, prefill_pairs, share)
        return seconds / self._speed

    def decode_line(self, decodes: int, context_tokens: int) -> tuple[float, float, int]:
        """Return the seconds of steps that only decode as a line."""
        fixed, slope, limit = self._costs.decode_line(decodes, context_tokens)
        return fixed / self._speed, slope / self._speed, limit

    def operations_seconds(
        self, decodes: int, context_tokens: int, prefill_tokens: int, prefill_pairs: float
    ) -> float | None:
        """Return the seconds that the operations of steps take on their own, None if unknown."""
        seconds = self._costs.operations_seconds(decodes, context_tokens, prefill_tokens, prefill_pairs)
        return None if seconds is None else seconds / self._speed

    def encode_seconds(self, modality: str, embeds: int, items: int = 1, share: float = 1.0) -> float:
        """Return the seconds to encode so many items together."""
        return self._costs.encode_seconds(modality, embeds, items, share) / self._speed

    def lane_seconds(
        self, modality: str, embeds: int, items: int = 1, share: float = 1.0, beside: bool = False
    ) -> float:
        """Return the seconds to encode items in the lane."""
        return self._costs.lane_seconds(modality, embeds, items, share, beside) / self._speed

    def in_lane(self, share: float) -> float:
        """Return the fraction left to the LLM while the lane works."""
        return self._costs.in_lane(share)

    def frontend_seconds(self, request: Request) -> float:
        """Return the front end's seconds before the engine gets the request."""
        return self._costs.frontend_seconds(request)

    @property
    def answer_seconds(self) -> float:
        """Return the seconds from the end of a step until the client has its tokens."""
        return self._costs.answer_seconds
