"""Our encoder cache manager alone, under vLLM's own schedulers, as with `--ec-manager-config`."""

from __future__ import annotations

import pytest

from tests.upstream import judge
from tests.upstream.expectations import BOOKS_WRITTEN_BY_TEST, entry_for
from tests.upstream.suite import CACHE_ALONE
from tests.upstream.test_upstream import STOCK_CLASSES, check_file

pytestmark = [pytest.mark.upstream, pytest.mark.slow, pytest.mark.long]


@pytest.mark.parametrize("path", CACHE_ALONE.files)
def test_passes_what_vllm_passes(path: str) -> None:
    check_file(CACHE_ALONE, path)


def test_vllm_schedulers_ran_on_our_manager() -> None:
    built = judge.ours(CACHE_ALONE).built
    assert not [name for name in built if name.startswith("vllm_omni_sched.")]
    there = [name for name in STOCK_CLASSES if name in built]  # classes for diffusion LLMs are made by few tests
    assert {"Scheduler", "AsyncScheduler"} <= {name.rsplit(".", 1)[-1] for name in there}
    assert min(built[name] for name in there) > 0
    assert min(sum(built[name] for name in there), built["OmniEncoderCacheManager"]) > 100


def test_cache_adds_up_after_every_test() -> None:
    ours = judge.ours(CACHE_ALONE)
    assert ours.validated > 100
    assert not {test: law for test, law in ours.unbalanced.items() if entry_for(test, BOOKS_WRITTEN_BY_TEST) is None}
