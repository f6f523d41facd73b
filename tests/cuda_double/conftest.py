"""Run the tests of this folder on the CUDA double, in `.venv-cuda` alone; `make test-cuda` and `make test-long` do."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

IS_HERE = Path(sys.prefix).name == ".venv-cuda"
collect_ignore_glob = [] if IS_HERE else ["test_*.py"]

if IS_HERE:
    from tests.cuda_double import build

    if not build.is_current():  # before torch is imported
        build.build()

    import torch

    from tests.cuda_double import control, kernels
    from tests.support.arena import place, small
    from tests.support.processes import Process, Processes
    from vllm_omni_sched.connectors.arena import ArenaOptions

    kernels.install()
    control.load_driver()
    control.load_nvml()


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.long)


if IS_HERE:

    @pytest.fixture(autouse=True)
    def whole_devices() -> Iterator[None]:
        """Devices without errors and without work, before and after each test."""
        bound, multiprocessors = 256 << 20, 132
        control.set_memory_bound(bound)
        control.set_multiprocessors(multiprocessors)
        yield
        control.mend()
        torch.cuda.synchronize()
        control.mend()
        torch.cuda.empty_cache()
        control.set_memory_bound(bound)
        failed, kernels.errors[:] = list(kernels.errors), []
        assert failed == []

    @pytest.fixture(scope="module")
    def all_processes() -> Iterator[Processes]:
        processes = Processes("tests.cuda_double.actor")
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
