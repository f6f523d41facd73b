"""What options bring beyond the default, under seeds that the search has not seen."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from vllm_omni_sched.errors import ConfigError
from vllm_omni_sched.sim.tune.search import Evaluate, Measured
from vllm_omni_sched.sim.tune.space import Options

_DRAWS = 10_000


class Verdict(str, Enum):
    """What the interval of a gain says."""

    HELPS = "helps"  # all of it is above 0
    UNKNOWN = "unknown"  # contains 0
    HARMS = "harms"  # all of it is below 0


@dataclass(frozen=True)
class Gain:
    """The mean of paired differences, and its bootstrap interval."""

    mean: float
    low: float
    high: float

    @property
    def verdict(self) -> Verdict:
        """What it says."""
        if self.low > 0:
            return Verdict.HELPS
        return Verdict.HARMS if self.high < 0 else Verdict.UNKNOWN


def paired_gain(
    ours: Sequence[float], default: Sequence[float], random: np.random.Generator, confidence: float = 0.95
) -> Gain:
    """What ours have more, seed by seed, with a percentile bootstrap interval (Efron and Tibshirani, 1993, ch. 13).

    Raises:
        ValueError: there are not as many, or fewer than 2.
    """
    if len(ours) != len(default) or len(ours) < 2:
        raise ValueError(f"pairs are needed, at least 2: got {len(ours)} and {len(default)}")
    more = np.asarray(ours, float) - np.asarray(default, float)
    means = more[random.integers(0, len(more), (_DRAWS, len(more)))].mean(axis=1)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Gain(float(more.mean()), float(low), float(high))


@dataclass(frozen=True)
class Compared:
    """Options beside the default. ``attainment``: the gain in it; ``ttft_p99``: in seconds, below 0 is sooner."""

    options: Options
    runs: tuple[Measured, ...]
    attainment: Gain
    ttft_p99: Gain


@dataclass(frozen=True)
class Comparison:
    """The best few beside the default; ``proposed`` is the one of the largest gain, if its interval is above 0."""

    default: tuple[Measured, ...]
    compared: tuple[Compared, ...]
    seeds: tuple[int, ...]
    confidence: float

    @property
    def proposed(self) -> Compared | None:
        """None: no option is known to help."""
        helps = [one for one in self.compared if one.attainment.verdict is Verdict.HELPS]
        return max(helps, key=lambda one: one.attainment.mean, default=None)


def compare(
    candidates: Sequence[Options],
    evaluate: Evaluate,
    seeds: Sequence[int],
    training_seeds: Sequence[int],
    random: np.random.Generator,
) -> Comparison:
    """Run the candidates and the default under held-out seeds.

    1. The same seed brings the same requests to all: differences are paired.
    2. Intervals hold for all candidates together with 95 % (Bonferroni): to choose the best of them costs nothing.

    Raises:
        ConfigError: a seed is one that the search has seen, or there are fewer than 2.
    """
    if shared := set(seeds) & set(training_seeds):
        raise ConfigError(f"held-out seeds must not be training seeds: {sorted(shared)} are both")
    if len(seeds) < 2:
        raise ConfigError(f"at least 2 held-out seeds are needed, got {len(seeds)}")
    confidence = 1 - 0.05 / max(1, len(candidates))
    default = tuple(evaluate({}, seed) for seed in seeds)
    compared = []
    for options in candidates:
        runs = tuple(evaluate(options, seed) for seed in seeds)
        gains = [
            paired_gain([run[at] for run in runs], [run[at] for run in default], random, confidence) for at in range(2)
        ]
        compared.append(Compared(options, runs, *gains))
    return Comparison(default, tuple(compared), tuple(seeds), confidence)
