"""Learn the cost of work on this machine from its measured times."""

from vllm_omni_sched.resource.rate import EncodeCost, Rate


class CostModel:
    """Seconds per encoder embedding of each modality, and per prompt token; 0 before anything was timed."""

    def __init__(self) -> None:
        self._encode = EncodeCost(start=0.0)
        self._prefill = Rate(start=0.0)

    def encoded(self, modality: str, num_embeds: int, seconds: float) -> None:
        """Record that an item of this modality was encoded."""
        self._encode.observe(modality, num_embeds, seconds)

    def prefilled(self, num_tokens: int, seconds: float) -> None:
        """Record that so many prompt tokens were computed."""
        self._prefill.observe(num_tokens, seconds)

    def encode_seconds(self, modality: str, num_embeds: int) -> float:
        """Return the expected seconds to encode so many embeddings."""
        return self._encode.seconds(modality, num_embeds)

    def prefill_seconds(self, num_tokens: int) -> float:
        """Return the expected seconds to compute so many prompt tokens."""
        return self._prefill.seconds(num_tokens)
