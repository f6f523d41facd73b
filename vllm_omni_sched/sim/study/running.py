"""Run the points of a study one after another, or several at once; those with choices are tuned first."""

import multiprocessing
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from typing import Any
from zlib import crc32

from vllm_omni_sched.config.errors import ConfigError, OmniSchedError
from vllm_omni_sched.sim.measure import Run
from vllm_omni_sched.sim.output import Spans
from vllm_omni_sched.sim.scenario.loader import merged
from vllm_omni_sched.sim.study import search as optimize
from vllm_omni_sched.sim.study.evaluate import Finding, evaluate, score
from vllm_omni_sched.sim.study.options import Search, Tune
from vllm_omni_sched.sim.study.plan import Point, Study

TRAINING = 1_000_000
"""The first training seed. Reported seeds lie below."""

Score = Callable[[Point, Search | None], float | None]
"""Function that returns the score of a point, higher is better; None if it is impossible."""


Tuned = Mapping[str, Any]
"""Records how choices were made, for result files: the ``chosen`` values by the name of the choice, their
``value_in_training``, the ``trials`` of all ``possible`` combinations, and the ``finalists`` with their ``value``, best
first."""


def tune(point: Point, search: Search | None, options: Tune, score: Score) -> Tuned:
    """Tune the choices of one variant in one case.

    1. ``trials`` different combinations are tried under the training seeds. The first has the first value of each
       choice, a third is drawn at random, and the tree-structured Parzen estimator of Optuna proposes the others. If
       there are no more combinations than trials, all are tried.
    2. The best ``finalists``, and always the first combination, are tried again with more requests and more seeds,
       and the best of them is chosen; of equals, the one that was better before.
    3. An impossible combination, such as a model that does not fit, is a trial too, and is never chosen.
    4. The result depends only on the point and the options, not on other variants or on when it is tuned.

    Raises:
        ConfigError: Optuna is not installed, a training seed is a reported one, or no combination is possible.
    """
    if point.seed >= TRAINING:
        raise ConfigError(f"seeds from {TRAINING} on are for training: 'seed' {point.seed} must be below")
    counts = {name: len(values) for name, values in point.choices.items()}
    possible = 1
    for count in counts.values():
        possible *= count
    best: float | None = None
    coarse = _coarser(search, options.precision)

    def tried(which: Mapping[str, int], seeds: int, more: Mapping[str, Any], least: float | None) -> float | None:
        chosen = {name: point.choices[name][at] for name, at in which.items()}
        found = []
        for seed in range(TRAINING, TRAINING + seeds):
            of = _with(point.chosen(chosen, seed, least or start.get(tuple(which.values()))), more)
            value = None if least is None else _below(of, least, search, score)
            value = score(of, coarse) if value is None else value
            if value is None:
                return None
            found.append(value)
        return statistics.fmean(found)

    start: dict[tuple[int, ...], float | None] = {}  # where the search of a finalist begins
    scores: dict[tuple[int, ...], float | None] = {}

    def proposed(trial: Any) -> dict[str, int]:
        return {name: trial.suggest_categorical(name, tuple(range(count))) for name, count in counts.items()}

    def scored(which: Mapping[str, int]) -> float | None:
        nonlocal best
        value = tried(which, options.seeds, options.trial, best)
        if value is not None and value > 0 and (best is None or value > best) and _rises(search):
            best = value
        return value

    first = dict.fromkeys(counts, 0)
    trials, startup = min(options.trials, possible), max(8, options.trials // 3)
    for which, value in optimize.search(proposed, scored, trials, crc32(point.label.encode()), startup, first):
        scores[tuple(which.values())] = value
    known = [(key, value) for key, value in scores.items() if value is not None]
    if not known:
        raise ConfigError(f"{point.source.where}, {point.label}: no combination of its choices can run")
    known.sort(key=lambda one: -one[1])  # stable: of equals, the one that was tried first
    again = []
    shipped = tuple(0 for _ in counts)
    last = known[: options.finalists]
    last += [one for one in known[options.finalists :] if one[0] == shipped]
    for key, value in last:
        which = dict(zip(counts, key, strict=True))
        start[key] = value if _rises(search) and value > 0 else None
        final = tried(which, options.final_seeds, options.final, None)
        if final is not None:
            again.append((key, final))
    again.sort(key=lambda one: -one[1])
    finalists = [
        {
            **{name: point.choices[name][at] for name, at in zip(counts, key, strict=True)},
            "value": _as_found(search, value),
        }
        for key, value in again
    ]
    chosen = {name: point.choices[name][at] for name, at in zip(counts, again[0][0], strict=True)}
    return {
        "chosen": chosen,
        "value_in_training": _as_found(search, again[0][1]),
        "trials": len(scores),
        "possible": possible,
        "finalists": finalists,
    }


def _below(point: Point, rate: float, search: Search | None, score: Score) -> float | None:
    """Return the score of a combination that does not hold the best rate so far, from one run.

    The run shows how far it stays below. None if it holds the rate, or is impossible.
    """
    assert search is not None
    held = score(_with(point, {search.key: rate}), None)
    if held is None or held >= (target := point.scenario().slo.attainment):
        return None
    return rate * max(held, 0.0) / target


def _with(point: Point, more: Mapping[str, Any]) -> Point:
    """Return the point with the values of trials, which no choice, no sweep and no value of the caller replaces."""
    return replace(point, overrides=merged(point.overrides, more))


def _rises(search: Search | None) -> bool:
    """Return whether a search begins at a value, so that a good one helps the next."""
    return search is not None and search.kind == "max_rate"


def _as_found(search: Search | None, score: float) -> float:
    return -score if search is not None and search.kind == "tightest_slo" else score


def _coarser(search: Search | None, precision: float) -> Search | None:
    if search is None:
        return None
    step = max(search.step, 1 + precision)
    return search.model_copy(update={"precision": max(search.precision, precision), "step": step})


FAILURES = (OmniSchedError, ArithmeticError, LookupError, MemoryError, RuntimeError, ValueError)
"""Exceptions of one point that do not affect the others."""
_DIED = "its process died; there may be too little memory: try fewer --jobs"


def run_study(
    study: Study,
    run: Run,
    jobs: int = 1,
    progress: Callable[[Point, float, int], None] | None = None,
    spans: Spans | None = None,
) -> Iterator[Finding]:
    """Yield findings as they come; a point that fails has its ``error``, and the others go on.

    Points with choices are tuned first, once for all seeds. Results do not depend on ``jobs``.

    Args:
        run: simulates one scenario; for several jobs it must be importable.
        jobs: processes. With one, all runs are in this process.
        progress: called with the point, its simulated seconds and its events; not with several jobs.
        spans: records the trace of all runs; not with several jobs.
    """
    if jobs > 1 and len(study.points) > 1:
        yield from _in_processes(study, run, min(jobs, len(study.points)))
        return
    for points in _grouped_for_tuning(study.points):
        found = _tuned(points[0], study, run) if points[0].choices else None
        for point in points:
            yield _evaluated(point, study.search, run, found, progress, spans)


def _grouped_for_tuning(points: Sequence[Point]) -> list[list[Point]]:
    """Return the points that are tuned together, each list in the order of its first."""
    groups: dict[tuple[str, str], list[Point]] = {}
    for point in points:
        groups.setdefault(point.without_choices, []).append(point)
    return list(groups.values())


def _tuned(point: Point, study: Study, run: Run) -> Tuned | str:
    """Return the tuned choices, or the error."""
    try:
        return tune(point, study.search, study.tune, lambda one, search: score(one, search, run))
    except FAILURES as error:
        return _message(error)


def _in_processes(study: Study, run: Run, jobs: int) -> Iterator[Finding]:
    # not forked: a fork copies locks that threads of this process may hold
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context) as pool:
        tuning: dict[Future[Tuned | str], list[Point]] = {}
        waiting: dict[Future[Finding], Point] = {}

        def submit(points: list[Point], found: Tuned | str | None) -> None:
            for point in points:
                waiting[pool.submit(_evaluated, point, study.search, run, found)] = point

        for points in _grouped_for_tuning(study.points):
            if points[0].choices:
                tuning[pool.submit(_tuned, points[0], study, run)] = points
            else:
                submit(points, None)
        try:
            while tuning or waiting:
                asked: list[Future[Any]] = [*tuning, *waiting]
                done, _ = wait(asked, return_when=FIRST_COMPLETED)
                for tuned in [one for one in tuning if one in done]:
                    points = tuning.pop(tuned)
                    try:
                        submit(points, tuned.result())
                    except BrokenProcessPool:
                        yield from (_failed(point, _DIED) for point in points)
                for future in [one for one in waiting if one in done]:
                    point = waiting.pop(future)
                    try:
                        yield future.result()
                    except BrokenProcessPool:
                        yield _failed(point, _DIED)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            if tuning or waiting:  # interrupted: their results are no longer needed
                for child in multiprocessing.active_children():
                    child.terminate()


def _evaluated(
    point: Point,
    search: Search | None,
    run: Run,
    tuned: Tuned | str | None = None,
    progress: Callable[[Point, float, int], None] | None = None,
    spans: Spans | None = None,
) -> Finding:
    def report(seconds: float, events: int) -> None:
        if progress is not None:
            progress(point, seconds, events)

    if isinstance(tuned, str):
        return _failed(point, tuned)
    try:
        if tuned is None:
            return evaluate(point, search, run, report, spans)
        start = tuned["value_in_training"] if search is not None and search.kind == "max_rate" else None
        finding = evaluate(point.chosen(tuned["chosen"], start=start), search, run, report, spans)
        finding.tuned = tuned
        return finding
    except FAILURES as error:
        return _failed(point, _message(error))


def _message(error: BaseException) -> str:
    return str(error) if isinstance(error, OmniSchedError) else f"{type(error).__name__}: {error}"


def _failed(point: Point, why: str) -> Finding:
    return Finding(point.variant, dict(point.values), point.seed, point.label, error=" ".join(why.split()))
