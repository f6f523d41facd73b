"""Train in episodes, one after another, with one exploring bandit."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from benchmarks.learning.settings import Setting
from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.resource.batch_size import BatchControl
from vllm_omni_sched.resource.engine.learned import ARMS, FEATURES, Chooser, Context, LearnedPrefill, LinearPolicy
from vllm_omni_sched.sim.episode import EpisodeResult, run_episode


class ThompsonChooser:
    """Linear Thompson sampling (Agrawal and Goyal, "Thompson sampling for contextual bandits with linear payoffs",
    ICML 2013), with one ridge regression for each arm.

    1. An arm is chosen by weights drawn from N(mean, spread^2 * inverse of B), B = I * ridge + sum of x x'.
    2. Its reward is added to the regression of that arm alone.

    Args:
        rng: generator of the weights.
        spread: spread of the draws; 0 never explores.
    """

    def __init__(self, rng: np.random.Generator, spread: float = 0.3, ridge: float = 1.0) -> None:
        size = len(FEATURES)
        self._rng, self._spread = rng, spread
        self._b = np.repeat(np.eye(size)[None] * ridge, len(ARMS), axis=0)
        self._sums = np.zeros((len(ARMS), size))
        self._means = np.zeros((len(ARMS), size))
        self._roots = np.repeat(np.eye(size)[None] / np.sqrt(ridge), len(ARMS), axis=0)
        self.pulls = [0] * len(ARMS)

    def expects(self, context: Context, arm: int) -> float:
        """Return the expected reward by the mean weights of the arm."""
        return float(self._means[arm] @ np.asarray(context))

    def choose(self, context: Context) -> int:
        """Choose an arm by rule 1."""
        drawn = self._rng.standard_normal(self._means.shape)
        weights = self._means + self._spread * np.einsum("aij,aj->ai", self._roots, drawn)
        return int(np.argmax(weights @ np.asarray(context)))

    def learn(self, context: Context, arm: int, reward: float) -> None:
        """Learn a reward by rule 2."""
        seen = np.asarray(context)
        self.pulls[arm] += 1
        self._b[arm] += np.outer(seen, seen)
        self._sums[arm] += reward * seen
        inverse = np.linalg.inv(self._b[arm])
        self._means[arm] = inverse @ self._sums[arm]
        self._roots[arm] = np.linalg.cholesky(inverse)

    def policy(self) -> LinearPolicy:
        """Return the learnt policy, which does not explore."""
        return LinearPolicy(self._means.tolist())


TARGET_SECONDS = 0.05
INTERVAL_SECONDS = 1.0

Episode = Callable[[Setting, int, Chooser], object]
"""Function that lets a chooser act in one setting under one seed."""


def act(setting: Setting, seed: int, chooser: Chooser, penalty: float) -> EpisodeResult:
    """Run one episode in which the chooser acts, and learns if it can."""
    limits = setting.limits
    control = LearnedPrefill(
        chooser,
        TARGET_SECONDS,
        setting.targets[1],
        INTERVAL_SECONDS,
        min(64, limits.max_num_batched_tokens),
        limits.max_num_batched_tokens,
        penalty,
    )
    return serve(setting, seed, OmniSchedConfig(encode_ahead=setting.encodes), control)


def serve(setting: Setting, seed: int, options: OmniSchedConfig, prefill: BatchControl | None = None) -> EpisodeResult:
    """Run one episode under these options."""
    return run_episode(
        setting.requests(seed),
        setting.costs,
        setting.limits,
        options,
        setting.seconds,
        setting.targets,
        prefill,
        drain_seconds=setting.seconds / 2,
    )


def train(
    settings: Sequence[Setting],
    seeds: Iterable[int],
    chooser: ThompsonChooser,
    rng: np.random.Generator,
    episode: Episode,
    progress: Callable[[int], None] | None = None,
) -> ThompsonChooser:
    """Run each setting once under each seed; ``rng`` draws the order of the settings for each seed.

    Args:
        progress: called with the number of episodes so far.
    """
    done = 0
    for seed in seeds:
        for at in rng.permutation(len(settings)):
            episode(settings[at], seed, chooser)
            done += 1
            if progress is not None:
                progress(done)
    return chooser
