"""Provide a folder and processes for paths of one host."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.arena import place
from tests.support.compiled import why_not_compiled
from tests.support.processes import Processes
from vllm_omni_sched.connectors import native


@pytest.fixture(scope="module")
def all_processes() -> Iterator[Processes]:
    processes = Processes("tests.support.arena_actor")
    yield processes
    processes.close()


@pytest.fixture
def in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the compiled steps, for tests that look into the Python code."""
    monkeypatch.setattr(native, "kernel", None)


@pytest.fixture(params=["compiled", "in Python"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Once with the compiled steps, where they are built, and once without."""
    if request.param == "in Python":
        monkeypatch.setattr(native, "kernel", None)
    elif (why_not := why_not_compiled()) is not None:
        pytest.skip(why_not)
    return str(request.param)


@pytest.fixture
def root(all_processes: Processes) -> Iterator[str]:
    with place() as root:
        yield root
        all_processes.end()
