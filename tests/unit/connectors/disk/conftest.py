"""Processes that send and receive through files, and where the files are."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.processes import Process, Processes


@pytest.fixture
def start(all_processes: Processes, root: str) -> Callable[[], Process]:
    def started() -> Process:
        process = all_processes.start()
        process.open_files(root)
        return process

    return started


@pytest.fixture
def directory(root: str) -> Path:
    return Path(root) / f"vllm-omni-sched-{os.geteuid()}" / "files"
