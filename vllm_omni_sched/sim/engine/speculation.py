"""Model speculative decoding by the acceptance of draft tokens."""

from dataclasses import dataclass

import numpy as np

from vllm_omni_sched.config.errors import ConfigError


@dataclass(frozen=True)
class Speculation:
    """Draft tokens that a decode step verifies for each request.

    1. A draft token is accepted with the same probability, if all before it were (Leviathan et al., "Fast inference
       from transformers via speculative decoding", ICML 2023). A step makes a token, and one for each accepted one.
    2. Steps of a request are drawn with a generator of its own, so it has the same luck whatever the schedule, and
       whatever the number of draft tokens.

    ``draft_tokens``: of a step (``num_speculative_tokens``). ``acceptance``: that probability.

    Raises:
        ConfigError: a number is out of its range.
    """

    draft_tokens: int
    acceptance: float
    seed: int = 0

    def __post_init__(self) -> None:
        if self.draft_tokens < 1:
            raise ConfigError(f"draft_tokens must be 1 or more, got {self.draft_tokens}")
        if not 0 <= self.acceptance <= 1:
            raise ConfigError(f"acceptance must be between 0 and 1, got {self.acceptance}")

    @property
    def tokens_of_step(self) -> float:
        """Return the mean number of tokens that a step makes for a request."""
        return sum(self.acceptance**number for number in range(self.draft_tokens + 1))

    def steps(self, request: int, tokens: int) -> int:
        """Return the steps in which a request makes so many tokens."""
        if tokens < 1:
            return 0
        if self.acceptance == 1:
            return -(-tokens // (self.draft_tokens + 1))
        rng = np.random.default_rng((self.seed, request))
        made = np.minimum(rng.geometric(1 - self.acceptance, tokens), self.draft_tokens + 1)
        return int(np.searchsorted(np.cumsum(made), tokens)) + 1
