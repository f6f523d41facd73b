"""Processes that send and receive over tiers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.processes import Process, Processes


@pytest.fixture
def start(all_processes: Processes, root: str) -> Callable[..., Process]:
    def started(**options: Any) -> Process:
        process = all_processes.start()
        process.open_tiers(root, **options)
        return process

    return started
