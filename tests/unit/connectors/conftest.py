"""Provide a folder and processes for paths of one host."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.arena import place
from tests.support.processes import Processes


@pytest.fixture(scope="module")
def all_processes() -> Iterator[Processes]:
    processes = Processes("tests.support.arena_actor")
    yield processes
    processes.close()


@pytest.fixture
def root(all_processes: Processes) -> Iterator[str]:
    with place() as root:
        yield root
        all_processes.end()
