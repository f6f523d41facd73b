"""What work costs on this machine, learnt from what it took."""

from vllm_omni_sched.errors import ConfigError


class CostModel:
    """Seconds per encoder embedding of each modality, and per prefill token: exponentially weighted means.

    A modality that was never seen is taken for the mean of those that were; before anything was seen, all is free.

    Args:
        weight: of a new observation, in (0, 1].

    Raises:
        ConfigError: ``weight`` is outside that range.
    """

    def __init__(self, weight: float = 0.2) -> None:
        if not 0 < weight <= 1:
            raise ConfigError(f"weight must be in (0, 1], got {weight}")
        self._weight = weight
        self._per_embed: dict[str, float] = {}
        self._per_token: float | None = None

    def encoded(self, modality: str, num_embeds: int, seconds: float) -> None:
        """An item of this modality was encoded."""
        if num_embeds > 0:
            self._per_embed[modality] = self._mean(self._per_embed.get(modality), seconds / num_embeds)

    def prefilled(self, num_tokens: int, seconds: float) -> None:
        """So many prompt tokens were computed."""
        if num_tokens > 0:
            self._per_token = self._mean(self._per_token, seconds / num_tokens)

    def encode_seconds(self, modality: str, num_embeds: int) -> float:
        """What encoding so many embeddings will take."""
        known = self._per_embed
        if modality in known:
            return num_embeds * known[modality]
        return num_embeds * sum(known.values()) / len(known) if known else 0.0

    def prefill_seconds(self, num_tokens: int) -> float:
        """What so many prompt tokens will take."""
        return num_tokens * (self._per_token or 0.0)

    def _mean(self, former: float | None, value: float) -> float:
        return value if former is None else former + self._weight * (value - former)
