"""Run the points of a study one after another, or several at once."""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from vllm_omni_sched.config.errors import OmniSchedError
from vllm_omni_sched.sim.output.spans import Spans
from vllm_omni_sched.sim.result import Run
from vllm_omni_sched.sim.study.evaluate import Finding, evaluate, score
from vllm_omni_sched.sim.study.options import Search
from vllm_omni_sched.sim.study.plan import Point, Study
from vllm_omni_sched.sim.study.tuning import Tuned, tune

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
        start = tuned.value if search is not None and search.kind == "max_rate" else None
        finding = evaluate(point.chosen(tuned.options, start=start), search, run, report, spans)
        finding.tuned = tuned.as_json()
        return finding
    except FAILURES as error:
        return _failed(point, _message(error))


def _message(error: BaseException) -> str:
    return str(error) if isinstance(error, OmniSchedError) else f"{type(error).__name__}: {error}"


def _failed(point: Point, why: str) -> Finding:
    return Finding(point.variant, dict(point.values), point.seed, point.label, error=" ".join(why.split()))
