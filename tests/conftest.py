from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.core import validated
from tests.support.environments import FIRST_ENVIRONMENT
from tests.support.sharing import PIPELINES, group_of
from vllm_omni_sched.logs import LOGGER

LONG = "long"
"""Marks the tests that `make test-long` alone runs, and names its profile of Hypothesis."""
USUAL = "usual"
"""Names the profile of Hypothesis in other suites."""
TIMES_AS_MANY_EXAMPLES = 20
ONCE, NEWEST = "once", "newest"
"""Marks of tests that `make test` runs in one environment alone, and `make test-long` in the other."""


@pytest.hookimpl(tryfirst=True)  # before Hypothesis looks for the profile
def pytest_configure(config: pytest.Config) -> None:
    from hypothesis import settings

    settings.register_profile(LONG, deadline=None)
    # No deadline: other processes may take the machine's time. Same examples in each run: one that fails fails again.
    settings.register_profile(USUAL, deadline=None, derandomize=True)
    if config.getoption("--hypothesis-profile", None) is None:
        settings.load_profile(USUAL)


def pytest_collection_finish() -> None:
    """Spare the garbage collector what stays for ever: modules of vLLM and torch, and the tests themselves."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--hypothesis-profile", None) == LONG:
        _lengthen_properties(items)
    for item in items:
        if item.get_closest_marker(NEWEST if FIRST_ENVIRONMENT else ONCE):
            item.add_marker(pytest.mark.long)
    if config.getoption("--processes", 1) > 1:
        items.sort(key=_turn)


def _lengthen_properties(items: list[pytest.Item]) -> None:
    """Mark properties as long, and let Hypothesis try more examples of them than in `make test`."""
    from hypothesis import settings

    owners: dict[int, tuple[Any, str]] = {}  # a function may be that of several tests
    for item in items:
        function: Any = getattr(item, "obj", None)
        if getattr(function, "is_hypothesis_test", False):
            item.add_marker(pytest.mark.long)
            function = getattr(function, "__func__", function)
            name = "_hypothesis_internal_use_settings"
            owner = (function, name) if hasattr(function, name) else (item.cls, "settings")  # a state machine
            owners[id(owner[0])] = owner
    for owner, name in owners.values():
        usual: settings = getattr(owner, name)
        setattr(owner, name, settings(usual, max_examples=TIMES_AS_MANY_EXAMPLES * usual.max_examples))


def _turn(item: pytest.Item) -> int:
    """Return a sort key: what takes longest goes first, so that no process is left alone with it in the end.

    The pipelines of vLLM-Omni run one after the other in one process, longer than any other group.
    """
    if group_of(item.nodeid) == PIPELINES:
        return 0
    return 1 if any(item.get_closest_marker(name) for name in ("engine", "upstream", "slow")) else 2


@pytest.fixture(scope="module", autouse=True)
def _nothing_unclosed() -> Iterator[None]:
    """Collect garbage at the end of each file: what its tests left open is an error there, not in a later test.

    What survives is hidden from the garbage collector, as after the collection of tests, so that this stays short.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Our records too: the logger `vllm`, under which ours are, passes none on to where pytest listens."""
    ours = logging.getLogger(LOGGER)
    propagated, level = ours.propagate, ours.level
    # vLLM's server imports model_hosting_container_standards, which lets root handlers, pytest's too, take errors alone
    caplog.handler.setLevel(logging.NOTSET)
    ours.addHandler(caplog.handler)
    ours.propagate = False  # else they come twice where vLLM has not set up its logger
    ours.setLevel(logging.INFO)  # vLLM's logger may have been made quieter by an import of its command line
    yield caplog
    ours.propagate = propagated
    ours.setLevel(level)
    ours.removeHandler(caplog.handler)


@pytest.fixture(scope="module")
def validated_core() -> Iterator[None]:
    """Check the laws of conservation of the pipeline core after every event."""
    with validated():
        yield
