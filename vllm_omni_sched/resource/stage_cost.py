"""Learn the cost of a request in each stage from past requests."""

import math
from dataclasses import dataclass
from operator import mul

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.resource.least_squares import NonNegativeFit


@dataclass(frozen=True)
class Features:
    """Size of a request for a stage. All are counts of that request; ``pixels`` of all its images and frames.

    ``output_tokens`` is the expected number until it is known; ``steps``: denoising steps.

    Raises:
        ValueError: one of them is negative or not finite.
    """

    prompt_tokens: float = 0
    output_tokens: float = 0
    items: float = 0
    pixels: float = 0
    audio_seconds: float = 0.0
    steps: float = 0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be finite and >= 0, got {value}")


@dataclass(frozen=True)
class CostPrior:
    """Seconds per unit before a stage was timed: the right order of magnitude for a small model on one device.

    Raises:
        ConfigError: one of them is negative or not finite.
    """

    per_request: float = 0.005
    per_prompt_token: float = 1e-4
    per_output_token: float = 0.01
    per_item: float = 0.02
    per_pixel: float = 1e-8
    per_audio_second: float = 0.01
    per_pixel_step: float = 2e-8

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value < math.inf:
                raise ConfigError(f"{name} must be finite and >= 0 seconds, got {value}")


# One unit of each regressor, so that all are about 1 for a usual request and one ridge suits them all.
_UNITS = (1.0, 1e3, 1e2, 1.0, 1e6, 10.0, 1e7)
_OUTPUT = 2
_OUTLIVED = 0.1  # of the tokens it has made: further tokens expected of a request that is longer than expected


class StageCosts:
    """Seconds per request and stage: linear in the features, with weights that are never negative.

    1. Least squares with exponential forgetting and a ridge towards the prior (Åström and Wittenmark,
       "Adaptive Control", 2.2): directions that the observations do not determine keep the prior.
    2. An outlier counts as a less extreme one (Huber, 1964). A lasting change is
       followed within some tens of observations: the usual residual grows with it.
    3. An estimate lies in ``[0, max_seconds]``; a stage that was never timed costs what the prior gives.

    Args:
        forgetting: weight that an observation keeps after the next one, in (0, 1).
        max_seconds: upper bound of estimates and of observations.

    Raises:
        ConfigError: an argument is out of range.
    """

    def __init__(self, prior: CostPrior | None = None, forgetting: float = 0.98, max_seconds: float = 3600.0) -> None:
        if not 0 < forgetting < 1:
            raise ConfigError(f"forgetting must be in (0, 1), got {forgetting}")
        if not 0 < max_seconds < math.inf:
            raise ConfigError(f"max_seconds must be above 0, got {max_seconds}")
        self.max_seconds = max_seconds
        self._forgetting = forgetting
        weights = vars(prior or CostPrior()).values()
        self._prior = [weight * unit for weight, unit in zip(weights, _UNITS, strict=True)]
        self._fits: dict[str, NonNegativeFit] = {}

    def estimate(self, stage_id: str, features: Features) -> float:
        """Return the expected seconds of the request in the stage."""
        weights = self._weights(stage_id)
        total: float = sum(map(mul, weights, _regressors(features)))
        return min(total, self.max_seconds)

    def observe(self, stage_id: str, features: Features, seconds: float) -> None:
        """Record that a request with these features took so long in the stage; ``output_tokens`` is the actual number.

        Raises:
            ValueError: ``seconds`` is negative or not finite.
        """
        if not 0 <= seconds < math.inf:
            raise ValueError(f"seconds must be finite and >= 0, got {seconds}")
        fit = self._fits.get(stage_id)
        if fit is None:
            fit = self._fits[stage_id] = NonNegativeFit(self._prior, self._forgetting)
        fit.add(_regressors(features), min(seconds, self.max_seconds))

    def remaining(self, stage_id: str, features: Features, done_output_tokens: float) -> float:
        """Return the expected seconds left of a request that has made so many output tokens.

        Once it makes output, only the remaining tokens count. One that has made more than expected will make more:
        lengths of answers have a long tail.

        Raises:
            ValueError: ``done_output_tokens`` is negative or not finite.
        """
        if not 0 <= done_output_tokens < math.inf:
            raise ValueError(f"done_output_tokens must be finite and >= 0, got {done_output_tokens}")
        if done_output_tokens == 0:
            return self.estimate(stage_id, features)
        left = max(features.output_tokens - done_output_tokens, _OUTLIVED * done_output_tokens)
        return min(self._weights(stage_id)[_OUTPUT] * left / _UNITS[_OUTPUT], self.max_seconds)

    def is_measured(self, stage_id: str) -> bool:
        """Return whether the stage was timed at all."""
        return stage_id in self._fits

    def _weights(self, stage_id: str) -> list[float]:
        fit = self._fits.get(stage_id)
        return self._prior if fit is None else fit.weights


def _regressors(features: Features) -> list[float]:
    values = (
        1.0,
        features.prompt_tokens,
        features.output_tokens,
        features.items,
        features.pixels,
        features.audio_seconds,
        features.pixels * features.steps,
    )
    return [value / unit for value, unit in zip(values, _UNITS, strict=True)]
