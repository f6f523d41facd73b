"""Measure the gain of options over the present ones, under seeds that the search has not seen."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.tune.search import Evaluate, Measured, Options

_DRAWS = 10_000


class Verdict(str, Enum):
    """Verdict from the interval of a gain."""

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
        """Return the verdict from the interval."""
        if self.low > 0:
            return Verdict.HELPS
        return Verdict.HARMS if self.high < 0 else Verdict.UNKNOWN


def paired_gain(
    ours: Sequence[float], default: Sequence[float], rng: np.random.Generator, confidence: float = 0.95
) -> Gain:
    """Return the mean paired difference with a percentile bootstrap interval (Efron and Tibshirani, 1993, ch. 13).

    Raises:
        ValueError: the numbers of values differ, or there are fewer than 2.
    """
    if len(ours) != len(default) or len(ours) < 2:
        raise ValueError(f"pairs are needed, at least 2: got {len(ours)} and {len(default)}")
    more = np.asarray(ours, float) - np.asarray(default, float)
    means = more[rng.integers(0, len(more), (_DRAWS, len(more)))].mean(axis=1)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Gain(float(more.mean()), float(low), float(high))


@dataclass(frozen=True)
class Gains:
    """Gains of options over a baseline. ``attainment``: gain in it; ``ttft_p99``: in seconds, negative is sooner."""

    attainment: Gain
    ttft_p99: Gain


@dataclass(frozen=True)
class Compared:
    """Options under the held-out seeds. ``over``: their gains by the name of a baseline."""

    options: Options
    runs: tuple[Measured, ...]
    over: Mapping[str, Gains]

    @property
    def helps(self) -> bool:
        """Return whether it is known to be better than each baseline."""
        return all(one.attainment.verdict is Verdict.HELPS for one in self.over.values())


@dataclass(frozen=True)
class Comparison:
    """The best few and the baselines, by name: the present options first, then the server's defaults if those differ,
    then vLLM with its own flags tuned if those help.
    """

    baselines: Mapping[str, Compared]
    compared: tuple[Compared, ...]
    seeds: tuple[int, ...]
    confidence: float

    @property
    def now(self) -> str:
        """Return the name of the present options."""
        return next(iter(self.baselines))

    @property
    def proposed(self) -> tuple[str, Compared]:
        """Return the options to serve with, and their name if they are a baseline.

        1. Of the options that are known to help over all baselines, those with the largest gain over the present ones.
        2. Otherwise the baseline that is known to help most over the present options: the server's defaults, or
           vLLM's own flags.
        3. Otherwise the present options.
        """
        helps = [one for one in self.compared if one.helps]
        if helps:
            return "", max(helps, key=lambda one: one.over[self.now].attainment.mean)
        known = [item for item in self.baselines.items() if item[0] != self.now and item[1].helps]
        if known:
            return max(known, key=lambda item: item[1].over[self.now].attainment.mean)
        return self.now, self.baselines[self.now]


def compare(
    candidates: Sequence[Options],
    evaluate: Evaluate,
    seeds: Sequence[int],
    training_seeds: Sequence[int],
    rng: np.random.Generator,
    baselines: Mapping[str, Options],
) -> Comparison:
    """Run the candidates and the baselines under held-out seeds.

    1. The same seed gives all the same requests: differences are paired.
    2. Intervals hold for all comparisons together with 95 % (Bonferroni), so choosing the best does not bias them.

    Args:
        baselines: all options of each, by name; the first is the present one.

    Raises:
        ConfigError: a seed is one that the search has seen, or there are fewer than 2.
    """
    if shared := set(seeds) & set(training_seeds):
        raise ConfigError(f"held-out seeds must not be training seeds: {sorted(shared)} are both")
    if len(seeds) < 2:
        raise ConfigError(f"at least 2 held-out seeds are needed, got {len(seeds)}")
    pairs = (len(baselines) - 1) + len(candidates) * len(baselines)
    confidence = 1 - 0.05 / max(1, pairs)

    def measured(options: Options, beside: Mapping[str, Compared]) -> Compared:
        runs = tuple(evaluate(options, seed) for seed in seeds)
        over = {}
        for name, other in beside.items():
            both = ([run[at] for run in one] for at in range(2) for one in (runs, other.runs))
            gains = [paired_gain(ours, theirs, rng, confidence) for ours, theirs in zip(both, both, strict=True)]
            over[name] = Gains(*gains)
        return Compared(options, runs, over)

    known: dict[str, Compared] = {}
    for name, options in baselines.items():
        known[name] = measured(options, dict(list(known.items())[:1]))
    return Comparison(known, tuple(measured(one, known) for one in candidates), tuple(seeds), confidence)
