"""What work costs on this machine, learnt from what it took."""

from vllm_omni_sched.resource.rate import EncodeCost, Rate


class CostModel:
    """Seconds per encoder embedding of each modality, and per prompt token; before anything was timed, all is free."""

    def __init__(self) -> None:
        self._encode = EncodeCost(start=0.0)
        self._prefill = Rate(start=0.0)

    def encoded(self, modality: str, num_embeds: int, seconds: float) -> None:
        """An item of this modality was encoded."""
        self._encode.observe(modality, num_embeds, seconds)

    def prefilled(self, num_tokens: int, seconds: float) -> None:
        """So many prompt tokens were computed."""
        self._prefill.observe(num_tokens, seconds)

    def encode_seconds(self, modality: str, num_embeds: int) -> float:
        """What encoding so many embeddings will take."""
        return self._encode.seconds(modality, num_embeds)

    def prefill_seconds(self, num_tokens: int) -> float:
        """What so many prompt tokens will take."""
        return self._prefill.seconds(num_tokens)
