"""Choose the latency target of a prefill limit with a contextual bandit trained in the simulator."""

import json
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from importlib.resources import files
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.resource.batch_size import BatchControl
from vllm_omni_sched.resource.engine.prefill_budget import AdaptivePrefill


class TrustReason(str, Enum):
    """State of the guard's trust in the choices."""

    LEARNING = "learning"  # too few rewards to decide: trusted
    GOOD = "good"  # no worse than the expected rewards of the fallback
    RESTING = "resting"  # was worse: the fallback is used
    ON_TRIAL = "on_trial"  # has rested: trusted again, until there are enough rewards to decide


class RewardGuard:
    """Compares the rewards of choices with the expected rewards of the fallback in the same contexts.

    1. Over the last ``window`` rewards, the mean must not be more than ``margin`` below the mean of the expected ones.
       Otherwise the fallback is used for ``rest`` rewards.
    2. Then the choices are on trial: rule 1 applies again after ``window`` rewards of their own.
    3. Each failed trial doubles the rest, up to 16 times; a good one resets it to ``rest``.

    Raises:
        ConfigError: ``window`` is below 2, ``rest`` below 1, or ``margin`` negative.
    """

    _LONGEST = 16

    def __init__(self, window: int = 20, margin: float = 0.15, rest: int = 60) -> None:
        if window < 2 or rest < 1 or not margin >= 0:
            raise ConfigError(
                f"need window of 2 or more, rest of 1 or more, margin of 0 or more, got {window}, {rest}, {margin}"
            )
        self.window, self.margin, self.rest = window, margin, rest
        self.reason = TrustReason.LEARNING
        self._lacks: deque[float] = deque(maxlen=window)  # expected reward of the fallback minus the reward
        self._left = 0
        self._times = 1

    @property
    def trusted(self) -> bool:
        return self.reason is not TrustReason.RESTING

    def observe(self, reward: float, expected: float) -> TrustReason:
        """Record a reward and the expected reward of the fallback, and return the new state."""
        if self.reason is TrustReason.RESTING:
            self._left -= 1
            if self._left <= 0:
                self.reason = TrustReason.ON_TRIAL
            return self.reason
        self._lacks.append(expected - reward)
        if len(self._lacks) < self.window:
            return self.reason
        if sum(self._lacks) > self.margin * self.window:
            if self.reason is not TrustReason.ON_TRIAL:
                self._times = 1
            self._left = self.rest * self._times
            self._times = min(2 * self._times, self._LONGEST)
            self._lacks.clear()
            self.reason = TrustReason.RESTING
        else:
            self.reason = TrustReason.GOOD
        return self.reason


ARMS = (0.5, 0.7, 0.85, 1.0, 1.25, 1.6)
"""Targets of a step, as multiples of the operator's target."""
FALLBACK = ARMS.index(1.0)
"""Index of the arm that is plain `AdaptivePrefill`."""
FEATURES = ("one", "latency", "base", "filled", "over", "overshoot")
"""Names of the values of `Interval.context`, in this order."""
_FADES = 0.9  # fraction of an overshoot that remains after each interval
_MOST_OVERSHOOT = 4.0

Context = tuple[float, ...]


class Chooser(Protocol):
    """Chooses among ``ARMS``."""

    def choose(self, context: Context) -> int:
        """Return the index into ``ARMS`` to use in this context."""

    def expects(self, context: Context, arm: int) -> float:
        """Return the expected reward of that arm."""

    def learn(self, context: Context, arm: int, reward: float) -> None:
        """Learn the reward of an arm that was chosen in this context."""


class LinearPolicy:
    """Chooses the arm of the largest expected reward, weights * context; of equal ones the nearest to the fallback.

    It does not explore or learn: its choice depends on weights and context alone.

    Args:
        weights: one row for each arm, one number for each feature.

    Raises:
        ConfigError: the weights have another shape, or are not finite.
    """

    def __init__(self, weights: Sequence[Sequence[float]]) -> None:
        self.weights = tuple(tuple(map(float, row)) for row in weights)
        if len(self.weights) != len(ARMS) or any(len(row) != len(FEATURES) for row in self.weights):
            raise ConfigError(f"weights must be {len(ARMS)} rows of {len(FEATURES)} numbers, one for each arm")
        if not all(math.isfinite(value) for row in self.weights for value in row):
            raise ConfigError("weights must be finite")
        self._order = sorted(range(len(ARMS)), key=lambda arm: (abs(arm - FALLBACK), arm))

    def expects(self, context: Context, arm: int) -> float:
        return sum(weight * value for weight, value in zip(self.weights[arm], context, strict=True))

    def choose(self, context: Context) -> int:
        return max(self._order, key=lambda arm: self.expects(context, arm))

    def learn(self, context: Context, arm: int, reward: float) -> None:
        pass


class Interval:
    """Statistics of the steps since the last decision: context of the next decision and reward of the last.

    ``reward`` is in [-penalty, 1]: the fraction of the time spent on prompt tokens, which produce first tokens,
    minus ``penalty`` times the fraction of steps that took longer than promised, each of which breaks the promise to
    all decoding requests. It is computed from the arguments of `observe` alone, so it is the same in the engine; it
    leaves out what only clients see, such as queueing.
    """

    __slots__ = ("_filled", "_late", "_longest", "_seconds", "_steps", "_tokens")

    def __init__(self) -> None:
        self._steps = self._filled = self._late = 0
        self._seconds = self._longest = 0.0
        self._tokens = 0

    def add(self, seconds: float, size: int, limit: int, promise_seconds: float) -> None:
        """Add a step of ``size`` prompt tokens under a limit."""
        self._steps += 1
        self._seconds += seconds
        self._tokens += size
        self._filled += size >= limit
        self._late += seconds > promise_seconds
        if 2 * size >= limit and seconds > self._longest:
            self._longest = seconds

    @property
    def mean_seconds(self) -> float:
        """Return the mean seconds of a step."""
        return self._seconds / self._steps

    def reward(self, seconds_per_token: float, penalty: float) -> float:
        """Return the reward of the last choice."""
        used = self._tokens * seconds_per_token / self._seconds if self._seconds else 0.0
        return min(used, 1.0) - penalty * self._late / self._steps

    @property
    def longest_seconds(self) -> float:
        """Return the longest seconds of a step that was at least half full; 0 without one."""
        return self._longest

    def context(self, target_seconds: float, base_seconds: float, overshoot: float) -> Context:
        """Return the values of ``FEATURES``, each within [0, 2]: mean latency and the fitted latency of a step without
        prompts, relative to the target; fractions of steps that were full, and later than promised; half the overshoot.

        Args:
            overshoot: the longest of the last steps relative to its target, at most 4.
        """
        latency = min(self.mean_seconds / target_seconds, 2.0)
        base = min(base_seconds / target_seconds, 2.0)
        return (1.0, latency, base, self._filled / self._steps, self._late / self._steps, overshoot / 2)


class LearnedPrefill(BatchControl):
    """`AdaptivePrefill` with a target that a bandit chooses anew in each interval.

    1. The limit is that of `AdaptivePrefill` under the chosen target, ``ARMS`` * target: its bounds and rules hold.
    2. An interval is at least ``interval_seconds`` long and has at least one step. When it ends, the choice before it
       gets its reward (`Interval`), and the next arm is chosen by the context of the interval.
    3. While the guard does not trust the choices (`RewardGuard`), the target is that of the operator.
    4. Nothing here is random; training injects a ``chooser`` that explores.

    The form is that of Li et al., "A contextual-bandit approach to personalized news article recommendation" (WWW
    2010), with one linear model for each arm; choices are assumed to have no effect on later contexts.

    Args:
        promise_seconds: the longest time between two tokens that was promised, for the reward.
        penalty: see `Interval`.

    Raises:
        ConfigError: a time is not above 0, the penalty is negative, or an argument is invalid for `AdaptivePrefill`.
    """

    def __init__(
        self,
        chooser: Chooser,
        target_seconds: float = 0.05,
        promise_seconds: float = 0.1,
        interval_seconds: float = 1.0,
        minimum: int = 64,
        maximum: int = 8192,
        penalty: float = 5.0,
        guard: RewardGuard | None = None,
    ) -> None:
        super().__init__(minimum, maximum)
        for name, value in (("promise_seconds", promise_seconds), ("interval_seconds", interval_seconds)):
            if not 0 < value < math.inf:
                raise ConfigError(f"{name} must be above 0, got {value}")
        if not 0 <= penalty < math.inf:
            raise ConfigError(f"penalty must be 0 or more, got {penalty}")
        self._adaptive = AdaptivePrefill(target_seconds, minimum, maximum)
        self.target_seconds, self.promise_seconds = target_seconds, promise_seconds
        self.interval_seconds, self.penalty = interval_seconds, penalty
        self.chooser = chooser
        self.guard = guard
        self.arm = FALLBACK
        self._chosen: Context | None = None  # context in which the arm of this interval was chosen
        self._overshoot = 0.0
        self._began: float | None = None
        self._interval = Interval()

    def _observe(self, latency_seconds: float, now: float, size: int) -> None:
        if self._began is None or now < self._began:  # a clock that was set back starts a new interval
            self._began, self._interval = now, Interval()
        self._interval.add(latency_seconds, size, self.limit, self.promise_seconds)
        if now - self._began >= self.interval_seconds:
            self._decide()
            self._began, self._interval = now, Interval()
        self._adaptive.observe(latency_seconds, now, size)
        self.limit, self.reason = self._adaptive.limit, self._adaptive.reason

    def _decide(self) -> None:
        over = self._interval.longest_seconds / (ARMS[self.arm] * self.target_seconds)
        self._overshoot = max(_FADES * self._overshoot, min(over, _MOST_OVERSHOOT))
        context = self._interval.context(self.target_seconds, self._adaptive.base_seconds, self._overshoot)
        if self._chosen is not None:
            reward = self._interval.reward(self._adaptive.seconds_per_token, self.penalty)
            self.chooser.learn(self._chosen, self.arm, reward)
            if self.guard is not None:
                self.guard.observe(reward, self.chooser.expects(self._chosen, FALLBACK))
        trusted = self.guard is None or self.guard.trusted
        self.arm = self.chooser.choose(context) if trusted else FALLBACK
        self._chosen = context
        self._adaptive.itl_target_seconds = ARMS[self.arm] * self.target_seconds


FORMAT = "vllm-omni-sched learned prefill"
_SHIPPED = "learned_prefill.json"


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    format: str
    version: int = Field(ge=1, le=1)
    arms: tuple[float, ...]
    features: tuple[str, ...]
    penalty: float = Field(ge=0, allow_inf_nan=False)
    weights: tuple[tuple[float, ...], ...]
    provenance: dict[str, Any]


@dataclass(frozen=True)
class Learned:
    """Learnt weights, the penalty of the reward that they were trained on, and their provenance."""

    policy: LinearPolicy
    penalty: float
    provenance: dict[str, Any]

    def control(
        self,
        target_seconds: float,
        promise_seconds: float,
        interval_seconds: float,
        minimum: int,
        maximum: int,
    ) -> LearnedPrefill:
        """Return a controller that uses these weights, under a guard.

        The guard tolerates a reward that is worse by 15 % of the time and by one late step in a hundred.
        """
        return LearnedPrefill(
            self.policy,
            target_seconds,
            promise_seconds,
            interval_seconds,
            minimum,
            maximum,
            self.penalty,
            RewardGuard(margin=0.15 + 0.01 * self.penalty),
        )

    def as_json(self) -> str:
        """Return the content of a weights file."""
        body = _File(
            format=FORMAT,
            version=1,
            arms=ARMS,
            features=FEATURES,
            penalty=self.penalty,
            weights=tuple(tuple(round(value, 6) for value in row) for row in self.policy.weights),
            provenance=self.provenance,
        )
        return json.dumps(body.model_dump(mode="json"), indent=1) + "\n"


def read(text: str, where: str) -> Learned:
    """Parse the content of a weights file.

    Raises:
        ConfigError: it is not a weights file, or has other arms or features than this version.
    """
    try:
        body = _File.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{where}: {at + ': ' if at else ''}{first['msg']}; train it again") from None
    for name, found, wanted in (
        ("format", body.format, FORMAT),
        ("arms", body.arms, ARMS),
        ("features", body.features, FEATURES),
    ):
        if found != wanted:
            raise ConfigError(f"{where}: '{name}' is {found!r}, but this version needs {wanted!r}; train it again")
    return Learned(LinearPolicy(body.weights), body.penalty, body.provenance)


def shipped() -> Learned:
    """Return the weights that come with this package.

    Raises:
        ConfigError: as for `read`.
    """
    return read(files("vllm_omni_sched.resource").joinpath(_SHIPPED).read_text(encoding="utf-8"), _SHIPPED)
