"""A place, and processes, for paths of one host."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.arena import Processes, place


@pytest.fixture(scope="module")
def all_processes() -> Iterator[Processes]:
    processes = Processes()
    yield processes
    processes.close()


@pytest.fixture
def root(all_processes: Processes) -> Iterator[str]:
    with place() as root:
        yield root
        all_processes.end()
