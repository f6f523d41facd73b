"""Measure the time of the engine's steps, and predict that of the next one."""

from vllm_omni_sched.monitor.itl import ItlMeter
from vllm_omni_sched.resource.prefill_budget import LineFit


class StepMeter:
    """Times from one step's tokens to the next one's, with a line fitted to them by prompt tokens.

    1. A step counts if requests run at both of its ends; idle time is no step.
    2. The time that a step was held back is subtracted, and a step that encoded is not added to the fit.
    """

    def __init__(self) -> None:
        self.itl = ItlMeter()
        self._fit = LineFit(0.98)

    @property
    def seconds_per_token(self) -> float:
        """Return the fitted seconds per prompt token."""
        return self._fit.slope

    def step(
        self, now: float, num_running: int, prompt_tokens: int, *, rest_seconds: float = 0.0, encoded: bool = False
    ) -> float | None:
        """Record that a step has put out its tokens; return its seconds without the rest, or None by rule 1 or 2."""
        interval = self.itl.step(now, num_running)
        if interval is None or encoded:
            return None
        seconds = interval - rest_seconds if interval > rest_seconds else 0.0
        self._fit.add(prompt_tokens, seconds)
        return seconds

    def predict(self, prompt_tokens: int) -> float:
        """Return the predicted seconds of a step with so many prompt tokens."""
        return self._fit.at_zero + self._fit.slope * prompt_tokens
