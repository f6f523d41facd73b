"""Measure the time from one step's tokens to the next one's, and learn what work costs from measured times."""

from vllm_omni_sched.resource.engine.prefill_budget import LineFit
from vllm_omni_sched.resource.rate import EncodeCost, Rate


class ItlMeter:
    """An exponentially weighted mean of the intervals between steps that gave tokens to the same requests.

    1. An interval counts if requests decode at both of its ends; idle time is no latency.
    2. Long intervals count at once: the mean moves up by ``rise`` of the difference, down by ``fall``.

    Args:
        rise, fall: in (0, 1].

    Raises:
        ValueError: one of them is outside that range.
    """

    def __init__(self, rise: float = 0.3, fall: float = 0.05) -> None:
        for name, weight in (("rise", rise), ("fall", fall)):
            if not 0 < weight <= 1:
                raise ValueError(f"{name} must be in (0, 1], got {weight}")
        self.rise = rise
        self.fall = fall
        self.seconds: float | None = None
        self._last: float | None = None

    def step(self, now: float, num_decoding: int) -> float | None:
        """Record that a step has put out tokens for so many requests; return the interval if it counts, else None."""
        last, self._last = self._last, now if num_decoding else None
        if last is None or not num_decoding:
            return None
        interval = now - last if now > last else 0.0
        if self.seconds is None:
            self.seconds = interval
        else:
            weight = self.rise if interval > self.seconds else self.fall
            self.seconds += weight * (interval - self.seconds)
        return interval


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
        seconds = self.itl.step(now, num_running)
        if seconds is None or encoded:
            return None
        if rest_seconds:
            seconds = seconds - rest_seconds if seconds > rest_seconds else 0.0
        self._fit.add(prompt_tokens, seconds)
        return seconds

    def predict(self, prompt_tokens: int) -> float:
        """Return the predicted seconds of a step with so many prompt tokens."""
        return self._fit.at_zero + self._fit.slope * prompt_tokens


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
