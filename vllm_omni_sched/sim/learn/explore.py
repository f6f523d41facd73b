"""Explore with a contextual bandit."""

import numpy as np

from vllm_omni_sched.resource.learned import ARMS, FEATURES, Context, LinearPolicy


class ThompsonChooser:
    """Linear Thompson sampling (Agrawal and Goyal, "Thompson sampling for contextual bandits with linear payoffs",
    ICML 2013), with one ridge regression for each arm.

    1. An arm is chosen by weights drawn from N(mean, spread^2 * inverse of B), B = I * ridge + sum of x x'.
    2. Its reward is added to the regression of that arm alone.

    Args:
        random: generator of the weights.
        spread: spread of the draws; 0 never explores.
    """

    def __init__(self, random: np.random.Generator, spread: float = 0.3, ridge: float = 1.0) -> None:
        size = len(FEATURES)
        self._random, self._spread = random, spread
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
        drawn = self._random.standard_normal(self._means.shape)
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
