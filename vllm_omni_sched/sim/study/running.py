"""One point after the other, or several at once."""

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool

from vllm_omni_sched.errors import OmniSchedError
from vllm_omni_sched.sim.output.spans import Spans
from vllm_omni_sched.sim.result import Run
from vllm_omni_sched.sim.study.evaluate import Finding, evaluate
from vllm_omni_sched.sim.study.options import Search
from vllm_omni_sched.sim.study.plan import Point, Study

FAILURES = (OmniSchedError, ArithmeticError, LookupError, MemoryError, RuntimeError, ValueError)
"""What may go wrong at one point without the others being in doubt."""


def run_study(
    study: Study,
    run: Run,
    jobs: int = 1,
    progress: Callable[[Point, float, int], None] | None = None,
    spans: Spans | None = None,
) -> Iterator[Finding]:
    """Findings as they come; a point that fails has its ``error``, and the others go on.

    Args:
        run: simulates one scenario; with several jobs it has to be importable where it is defined.
        jobs: processes. With one, all runs here.
        progress: called with the point, its simulated seconds and its events; not with several jobs.
        spans: gets the trace of all runs; not with several jobs.
    """
    if jobs > 1 and len(study.points) > 1:
        yield from _at_once(study, run, min(jobs, len(study.points)))
        return
    for point in study.points:
        yield _guarded(point, study.search, run, progress, spans)


def _at_once(study: Study, run: Run, jobs: int) -> Iterator[Finding]:
    # not forked: a fork copies locks that threads of this process may hold
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, initializer=_die_on_interrupt) as pool:
        waiting = {pool.submit(_guarded, point, study.search, run): point for point in study.points}
        try:
            for future in as_completed(waiting):
                try:
                    yield future.result()
                except BrokenProcessPool:
                    yield _failed(waiting[future], "its process died; there may be too little memory: try fewer --jobs")
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            if not all(future.done() for future in waiting):  # interrupted: nobody will want what they are at
                for child in multiprocessing.active_children():
                    child.terminate()


def _die_on_interrupt() -> None:
    """At Ctrl-C, which all processes get, without a word."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _guarded(
    point: Point,
    search: Search | None,
    run: Run,
    progress: Callable[[Point, float, int], None] | None = None,
    spans: Spans | None = None,
) -> Finding:
    def told(seconds: float, events: int) -> None:
        if progress is not None:
            progress(point, seconds, events)

    try:
        return evaluate(point, search, run, told, spans)
    except FAILURES as error:
        said = str(error) if isinstance(error, OmniSchedError) else f"{type(error).__name__}: {error}"
        return _failed(point, said)


def _failed(point: Point, why: str) -> Finding:
    return Finding(point.variant, dict(point.values), point.seed, point.label, error=" ".join(why.split()))
