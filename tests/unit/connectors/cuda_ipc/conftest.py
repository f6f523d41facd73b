"""Processes whose tensors lie on a device that is the host's memory, and are killed at exact points."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.arena import place, small
from tests.support.host_pair import Pair
from tests.support.processes import Process, Processes
from vllm_omni_sched.connectors.arena import ArenaOptions
from vllm_omni_sched.connectors.framing import message


@pytest.fixture(scope="module")
def all_processes() -> Iterator[Processes]:
    processes = Processes("tests.support.device_actor")
    yield processes
    processes.close()


@pytest.fixture
def root() -> Iterator[str]:
    with place() as root:
        yield root


@pytest.fixture
def arena(root: str) -> ArenaOptions:
    return small(root)


@pytest.fixture
def start(all_processes: Processes, arena: ArenaOptions) -> Iterator[Callable[..., Process]]:
    """Start a process, which announces itself before anybody sends."""

    def start(*names: str, options: ArenaOptions = arena, silent: bool = False, **more: object) -> Process:
        process = all_processes.start()
        process.open_device(options.model_dump(), list(names), **more)
        assert silent or process.get("nothing") is None
        return process

    yield start
    all_processes.end()


@pytest.fixture(autouse=True)
def all_in_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are in buffers, however small, as those of a device are."""
    monkeypatch.setattr(message, "EMBEDDED", -1)


@pytest.fixture
def pair(arena: ArenaOptions, request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(arena, **getattr(request, "param", {}))
    yield pair
    pair.close()
