"""Search for the options that do best under the training seeds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.extras import how_to_install
from vllm_omni_sched.sim.tune.space import SEQUENCES, TOKENS, Options, Parameter, flag_values, suggest


class Measured(NamedTuple):
    """Result of one run. ``attainment``: fraction of the requests within the SLO; ``ttft_p99``: in seconds."""

    attainment: float
    ttft_p99: float


Evaluate = Callable[[Options, int], Measured]
"""Function that measures options under a seed; the same seed gives the same requests, whatever the options."""

_TIE = 1e-6  # below the effect of one request in a million: P99 TTFT decides only among equals


@dataclass(frozen=True)
class Tried:
    """Options, and their results under each training seed."""

    options: Options
    runs: tuple[Measured, ...]

    @property
    def attainment(self) -> float:
        """Return the mean attainment over seeds."""
        return float(np.mean([run.attainment for run in self.runs]))

    @property
    def score(self) -> float:
        """Return the score to maximise: attainment; of equals, the lower P99 TTFT."""
        late = float(np.mean([run.ttft_p99 / (1 + run.ttft_p99) for run in self.runs]))
        return self.attainment - _TIE * late


@dataclass(frozen=True)
class Search:
    """All options that were tried, best first; of equals the fewest. ``interrupted``: before the last trial."""

    tried: tuple[Tried, ...]
    trials: int
    interrupted: bool


def search(
    parameters: Sequence[Parameter],
    evaluate: Evaluate,
    seeds: Sequence[int],
    trials: int,
    seed: int,
    progress: Callable[[int, Tried], None] | None = None,
    accepted: Callable[[Options], bool] = lambda options: True,
) -> Search:
    """Search with the tree-structured Parzen estimator (Bergstra et al., NeurIPS 2011) of Optuna.

    1. Each trial runs under all training seeds, the same for each trial (common random numbers).
    2. Repeated options are not run again, and those that a server would refuse are not run at all.
    3. An interrupt ends the search with what was tried so far.

    Args:
        seed: seed of the search.
        progress: called with the number of trials so far, and the best of them.
        accepted: returns whether a server would start with these options.

    Raises:
        ConfigError: Optuna is not installed, there is no seed, or ``trials`` is below 1.
    """
    if trials < 1 or not seeds:
        raise ConfigError(f"need at least one trial and one seed, got {trials} and {len(seeds)}")
    study = _study(seed)
    found: dict[tuple[Any, ...], Tried] = {}
    done = 0
    try:
        while done < trials:
            trial = study.ask()
            options = suggest(parameters, trial)
            if not accepted(options):
                study.tell(trial, state=_pruned())
                done += 1
                continue
            key = tuple(sorted(options.items()))
            if key not in found:
                found[key] = Tried(options, tuple(evaluate(options, one) for one in seeds))
            study.tell(trial, found[key].score)
            done += 1
            if progress is not None:
                progress(done, max(found.values(), key=lambda one: one.score))
    except KeyboardInterrupt:
        pass
    ordered = sorted(found.values(), key=lambda one: (-one.score, len(one.options)))
    return Search(tuple(ordered), done, done < trials)


def tuned_flags(evaluate: Evaluate, seeds: Sequence[int], max_num_seqs: int) -> Options:
    """Return the flags with which vLLM's own scheduler does best under the training seeds; none where none helps.

    1. The tokens of a step are chosen first, then the number of sequences. Each value is tried.
    2. A flag is set only where more requests are within the SLO than without it.
    3. An interrupt ends that with the best so far.
    """

    def tried(flags: Options) -> Tried:
        return Tried(flags, tuple(evaluate(flags, seed) for seed in seeds))

    best: Tried | None = None
    try:
        best = tried({})
        for name in (TOKENS, SEQUENCES):
            for other in [tried(best.options | {name: value}) for value in flag_values(name, max_num_seqs)]:
                if other.attainment > best.attainment:
                    best = other
    except KeyboardInterrupt:
        pass
    return {} if best is None else best.options


def changed_options(options: Options, default: Mapping[str, Any]) -> Options:
    """Return the options that differ from the defaults.

    Args:
        default: the default value of each option.
    """
    return {name: value for name, value in options.items() if value != default.get(name)}


def pruned(
    best: Tried,
    evaluate: Evaluate,
    seeds: Sequence[int],
    accepted: Callable[[Options], bool] = lambda options: True,
) -> Tried:
    """Return the best options without those that do no good under the training seeds, tested one after another.
    An interrupt ends that. Options that a server would refuse are not tried.
    """
    kept = best
    try:
        for name in best.options:
            options = {key: value for key, value in kept.options.items() if key != name}
            if not accepted(options):
                continue
            fewer = Tried(options, tuple(evaluate(options, one) for one in seeds))
            if fewer.score >= kept.score:
                kept = fewer
    except KeyboardInterrupt:
        pass
    return kept


def _pruned() -> Any:
    import optuna

    return optuna.trial.TrialState.PRUNED


def _study(seed: int) -> Any:
    try:
        import optuna
    except ImportError:
        raise ConfigError(f"Optuna is not installed: {how_to_install('tune')}") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
