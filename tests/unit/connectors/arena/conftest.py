"""Processes that send and receive in an arena of their own, and are killed at exact points."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.arena import small
from tests.support.processes import Process, Processes
from vllm_omni_sched.connectors.arena import ArenaOptions


@pytest.fixture
def options(root: str) -> ArenaOptions:
    return small(root)


@pytest.fixture
def start(all_processes: Processes, options: ArenaOptions) -> Callable[..., Process]:
    return lambda ahead=0.0, options=options: all_processes.open(options, ahead)


@pytest.fixture
def directory(root: str) -> Path:
    return Path(root) / f"vllm-omni-sched-{os.geteuid()}" / "a"
