"""vLLM's own tests of scheduler, encoder cache and model runners judge our classes, synchronous and asynchronous.

Same verdict as for vLLM's own classes in the same place, test by test; what is known to differ is in `expectations.py`.
"""

from __future__ import annotations

import pytest

from tests.upstream import judge
from tests.upstream.expectations import BOOKS_WRITTEN_BY_TEST, NOT_APPLICABLE, entry_for, stock_fails
from tests.upstream.suite import ASYNC, CACHE_TESTS, SYNC, SYNC_ELSEWHERE, WINDOWS, Guise

pytestmark = [pytest.mark.upstream, pytest.mark.slow]

GUISES = (SYNC, ASYNC, WINDOWS)
STOCK_CLASSES = (
    "vllm.v1.core.sched.scheduler.Scheduler",
    "vllm.v1.core.sched.async_scheduler.AsyncScheduler",
    "vllm.v1.core.sched.diffusion_scheduler.DiffusionScheduler",
    "vllm.v1.core.sched.diffusion_scheduler.DiffusionAsyncScheduler",
)


def marks(guise: Guise) -> tuple[pytest.MarkDecorator, ...]:
    return (pytest.mark.long,) if guise.long else ()


def by_file(*guises: Guise) -> pytest.MarkDecorator:
    cases = [
        pytest.param(guise, path, id=f"{guise.name}-{path}", marks=marks(guise))
        for guise in guises
        for path in guise.files
    ]
    return pytest.mark.parametrize(("guise", "path"), cases)


def by_name(*guises: Guise) -> pytest.MarkDecorator:
    cases = [pytest.param(guise, id=guise.name, marks=marks(guise)) for guise in guises]
    return pytest.mark.parametrize("guise", cases)


def check_file(guise: Guise, path: str) -> None:
    """Our classes pass the tests of a file that vLLM's pass, and only those; both but for the tests that are listed."""
    if not (judge.workspace() / path).is_file():
        pytest.skip(f"vLLM {judge.installed_version()} has no {path}")
    ours, stock = judge.both(guise)
    not_applicable, failing = NOT_APPLICABLE.get(guise.name, {}), stock_fails(guise.name, judge.version())
    assert ours.of(path).keys() == stock.of(path).keys()
    assert "passed" in ours.of(path).values()
    problems = []
    for test, outcome in ours.of(path).items():
        expected_of_stock = "failed" if entry_for(test, failing) else "passed"
        if stock.outcomes[test] not in (expected_of_stock, "skipped"):
            problems.append(f"{test}: vLLM's own class {stock.outcomes[test]}\n{stock.messages[test]}")
        elif outcome != ("failed" if entry_for(test, not_applicable) else stock.outcomes[test]):
            problems.append(f"{test}: ours {outcome}, vLLM's own class {stock.outcomes[test]}\n{ours.messages[test]}")
    if problems:
        pytest.fail("\n\n".join(problems), pytrace=False)


@by_file(*GUISES, SYNC_ELSEWHERE)
def test_passes_what_vllm_passes(guise: Guise, path: str) -> None:
    check_file(guise, path)


@by_name(*GUISES, SYNC_ELSEWHERE)
def test_every_listed_test_exists(guise: Guise) -> None:
    listed = {**NOT_APPLICABLE.get(guise.name, {}), **stock_fails(guise.name, judge.version())}
    there = {test for test in judge.ours(guise).outcomes if test.split("::")[0] in guise.files}
    due = {name for name in listed if name.split("::")[0] in guise.files}
    assert due == {entry_for(test, listed) for test in there} - {None}


@by_name(*GUISES, SYNC_ELSEWHERE)
def test_only_our_schedulers_were_built(guise: Guise) -> None:
    ours, stock = judge.both(guise)
    assert not set(ours.built) & set(STOCK_CLASSES)
    by_us = {name: count for name, count in ours.built.items() if name.startswith("vllm_omni_sched.")}
    by_vllm = {name: count for name, count in stock.built.items() if name in STOCK_CLASSES}
    assert sum(by_us.values()) > 100
    assert sum(by_vllm.values()) > 100


@by_name(SYNC, WINDOWS)
@pytest.mark.parametrize("mixin", ["RunnerV1Mixin", "RunnerV2Mixin", "EncoderRunnerMixin"])
def test_our_runner_mixins_were_used(guise: Guise, mixin: str) -> None:
    assert judge.ours(guise).built[mixin] > 0


@by_name(ASYNC)
def test_async_guise_builds_nothing_synchronous(guise: Guise) -> None:
    assert not [name for name in judge.ours(guise).built if name.endswith("OmniSyncScheduler")]


@by_name(*GUISES)
def test_sessions_were_sent_as_deltas(guise: Guise) -> None:
    assert judge.ours(guise).deltas > 0


@by_name(*GUISES)
def test_encoder_caches_add_up_after_every_test(guise: Guise) -> None:
    ours = judge.ours(guise)
    assert ours.validated > 100
    broken = {test: law for test, law in ours.unbalanced.items() if entry_for(test, BOOKS_WRITTEN_BY_TEST) is None}
    assert not broken
    due = BOOKS_WRITTEN_BY_TEST.keys() - stock_fails(guise.name, judge.version()).keys()  # those get as far as that
    listed_in_vain = due - {entry_for(test, BOOKS_WRITTEN_BY_TEST) for test in ours.unbalanced}
    assert not listed_in_vain


def test_a_broken_class_is_found_out() -> None:
    """Check the judge itself: with an encoder cache that never hits, vLLM's tests must fail."""
    verdict = judge.run(("--swap=cache", "--sabotage"), (CACHE_TESTS,))
    assert f"{CACHE_TESTS}::test_basic_allocate_and_reuse" in verdict.ids("failed")
    assert verdict.ids("passed")
