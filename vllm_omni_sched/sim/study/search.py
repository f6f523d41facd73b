"""Search for the options that do best under the training seeds."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.extras import how_to_install

Options = dict[str, Any]
"""Options as under ``omni_sched`` in vLLM's ``--additional-config``, and flags of vLLM, whose names begin with ``--``;
missing ones have their defaults."""

TOKENS, SEQUENCES = "--max-num-batched-tokens", "--max-num-seqs"
_TOKENS, _SEQUENCES = (256, 512, 1024, 2048, 4096, 8192), (8, 16, 32, 64, 128, 256)


def flags_of(options: Options) -> Options:
    """Return the flags of vLLM among the options."""
    return {name: value for name, value in options.items() if name.startswith("--")}


def policy_of(options: Options) -> Options:
    """Return the options of the scheduler among the options."""
    return {name: value for name, value in options.items() if not name.startswith("--")}


def command_line(flags: Options) -> str:
    """Return flags as they are given to ``vllm serve``."""
    return " ".join(f"{name} {value}" for name, value in flags.items())


def propose(trial: Any, itl_seconds: float, encodes: bool = True, max_num_seqs: int = 256) -> Options:
    """Return the options of the scheduler that a trial of Optuna proposes for an engine, without those of no effect.

    Args:
        itl_seconds: ITL target of the SLO; targets lie between a fifth of it and all of it.
        encodes: the engine has the encoder.
    """

    def number(name: str, low: float, high: float) -> float:
        return float(f"{trial.suggest_float(name, low, high, log=True):.3g}")  # readable

    choose = trial.suggest_categorical
    low, high = 200 * itl_seconds, 1000 * itl_seconds
    options: Options = {
        "prefill_control": choose("prefill_control", ("off", "pid", "adaptive")),
        "batch_control": choose("batch_control", ("off", "pid")),
    }
    if options["prefill_control"] != "off" or options["batch_control"] != "off":
        options["control_target_ms"] = number("control_target_ms", low, high)
    if options["batch_control"] != "off":
        options["batch_max"] = trial.suggest_int("batch_max", min(8, max_num_seqs), max_num_seqs, log=True)
    options["waiting_order"] = choose("waiting_order", ("arrival", "sla"))
    options["pieces"] = choose("pieces", (False, True))
    if encodes:
        options["encode_ahead"] = choose("encode_ahead", (False, True))
        if options["encode_ahead"]:
            options["encode_lane_min_share"] = number("encode_lane_min_share", 0.05, 0.6)
            options["itl_target_ms"] = number("itl_target_ms", low, high)
        else:
            options["encode_rounds"] = choose("encode_rounds", (False, True))
    return options


def flag_values(name: str, max_num_seqs: int) -> tuple[int, ...]:
    """Return the values of a flag that are tried; more sequences than the server may run now are not."""
    return _TOKENS if name == TOKENS else tuple(value for value in _SEQUENCES if value <= max_num_seqs)


_WORST = -1e9
_ASKED = 20  # times as many proposals as trials: a repeated one is no trial


def search(
    proposed: Callable[[Any], Options],
    score: Callable[[Options], float | None],
    trials: int,
    seed: int,
    startup: int = 10,
    first: Options | None = None,
) -> Iterator[tuple[Options, float | None]]:
    """Yield so many different options with their scores, or fewer if there are no more.

    They are those that the tree-structured Parzen estimator (Bergstra et al., NeurIPS 2011) of Optuna proposes, the
    first ``startup`` at random; before them ``first``. The same arguments yield the same.

    Args:
        proposed: returns the options of a trial of Optuna.
        score: returns the score to maximise; None if the options are impossible.

    Raises:
        ConfigError: Optuna is not installed.
    """
    try:
        import optuna
    except ImportError:
        raise ConfigError(f"Optuna is not installed: {how_to_install('tune')}") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=startup)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    if first is not None:
        study.enqueue_trial(first)
    scores: dict[str, float | None] = {}
    for _ in range(_ASKED * trials):
        if len(scores) == trials:
            return
        trial = study.ask()
        options = proposed(trial)
        key = repr(sorted(options.items()))
        is_new = key not in scores
        if is_new:
            scores[key] = score(options)
        found = scores[key]
        study.tell(trial, _WORST if found is None else max(found, _WORST))
        if is_new:
            yield options, found


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
    """All options that were tried, best first; of equals the fewest. ``trials``: with those that were refused."""

    tried: tuple[Tried, ...]
    trials: int
    interrupted: bool


def best_options(
    proposed: Callable[[Any], Options],
    evaluate: Evaluate,
    seeds: Sequence[int],
    trials: int,
    seed: int,
    progress: Callable[[int, Tried], None] | None = None,
    accepted: Callable[[Options], bool] = lambda options: True,
) -> Search:
    """Search for the options with the most requests within the SLO.

    1. Each trial runs under all training seeds, the same for each trial (common random numbers).
    2. Options that a server would refuse are not run.
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
    tried: list[Tried] = []
    done, interrupted = 0, False

    def score(options: Options) -> float | None:
        if not accepted(options):
            return None
        tried.append(Tried(options, tuple(evaluate(options, one) for one in seeds)))
        return tried[-1].score

    try:
        for _ in search(proposed, score, trials, seed):
            done += 1
            if progress is not None and tried:
                progress(done, max(tried, key=lambda one: one.score))
    except KeyboardInterrupt:
        interrupted = True
    return Search(tuple(sorted(tried, key=lambda one: (-one.score, len(one.options)))), done, interrupted)


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
