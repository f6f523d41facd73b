"""What the engine's steps take, and what the next one will."""

from vllm_omni_sched.monitor.itl import ItlMeter
from vllm_omni_sched.resource.prefill_budget import LineFit


class StepMeter:
    """Times from one step's tokens to the next one's, and a line through them by prompt tokens.

    1. A step counts while somebody runs at both of its ends; idle time is no step.
    2. What a step was held back, and a step that encoded, says nothing about tokens.
    """

    def __init__(self) -> None:
        self.itl = ItlMeter()
        self._fit = LineFit(0.98)

    @property
    def seconds_per_token(self) -> float:
        """Of prompt."""
        return self._fit.slope

    def step(
        self, now: float, num_running: int, prompt_tokens: int, *, rest_seconds: float = 0.0, encoded: bool = False
    ) -> float | None:
        """A step's tokens are out; what it took, without its rest, or None where rule 1 or 2 says so."""
        interval = self.itl.step(now, num_running)
        if interval is None or encoded:
            return None
        seconds = interval - rest_seconds if interval > rest_seconds else 0.0
        self._fit.add(prompt_tokens, seconds)
        return seconds

    def predict(self, prompt_tokens: int) -> float:
        """Seconds of a step with so many prompt tokens."""
        return self._fit.at_zero + self._fit.slope * prompt_tokens
