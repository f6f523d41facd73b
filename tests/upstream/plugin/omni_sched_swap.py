"""pytest plugin for a run of vLLM's own tests: puts our classes where those tests look for vLLM's.

It lives apart from the `tests` package of this project, because in that run `tests` is vLLM's. Names are rebound in
vLLM's modules before any test module is imported, so that imports, default arguments and parametrisations all see ours.

    pytest -p omni_sched_swap --swap=scheduler --force-async --outcomes=out.jsonl tests/v1/core/test_scheduler.py

Every outcome is written as soon as it is known; the last line counts what was built: a swap that did not take shows.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from omni_sched_stand_ins import as_workers_see_it, following_its_class, runner_with

from dev.model_registry import look_at_models_here

SCHEDULER = "vllm.v1.core.sched.scheduler"
ASYNC_SCHEDULER = "vllm.v1.core.sched.async_scheduler"
DIFFUSION_SCHEDULER = "vllm.v1.core.sched.diffusion_scheduler"
CACHE = "vllm.v1.core.encoder_cache_manager"
RUNNER_V1 = "vllm.v1.worker.gpu_model_runner"
RUNNER_V2 = "vllm.v1.worker.gpu.model_runner"
ENCODER_RUNNER_V2 = "vllm.v1.worker.gpu.mm.encoder_runner"
# Modules that derive from the names that are rebound; imported first, so that they derive from vLLM's own.
DERIVED = (DIFFUSION_SCHEDULER, "vllm.v1.worker.cpu_model_runner")
# Loops of a fixed number of random steps, cut to what a test suite can afford: vLLM's module -> steps.
SHORTENED = {"tests.v1.core.test_priority_scheduler_random": 1000}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("omni_sched_swap")
    group.addoption("--swap", choices=["none", "cache", "scheduler"], default="none", help="our classes")
    group.addoption("--force-async", action="store_true", help="tests that name Scheduler get the asynchronous one")
    group.addoption("--narrow", action="store_true", help="use our windows even where vLLM bisects by itself")
    group.addoption("--sabotage", action="store_true", help="our cache never hits: proof that the judge notices")
    group.addoption("--part", action="append", default=[], help="FILE=WORD: only tests with WORD in their name")
    group.addoption("--outcomes", type=Path, help="JSON lines: one per test, and a summary")


def pytest_configure(config: pytest.Config) -> None:
    options = config.option
    run = Run(options.swap, options.force_async, options.narrow, options.outcomes)
    run.parts = dict(part.split("=") for part in options.part)
    if options.sabotage:
        from vllm_omni_sched import OmniEncoderCacheManager

        OmniEncoderCacheManager.check_and_update_cache = lambda manager, request, input_id: False
    config.pluginmanager.register(run)


class Run:
    """Rebinds vLLM's classes for one run, and records it."""

    def __init__(self, swap: str, force_async: bool, narrow: bool, outcomes: Path | None) -> None:
        self.outcomes = outcomes.open("w") if outcomes else None
        self.built: Counter[str] = Counter()
        self.validated = 0
        self.managers: list[Any] = []
        self.scheduler: type | None = None
        self.parts: dict[str, str] = {}
        for name in DERIVED:
            if _exists(name):
                import_module(name)
        _pageable_memory_for_pinned()
        look_at_models_here()
        self._count_schedulers()
        if swap == "scheduler":
            self._swap_schedulers(force_async, narrow)
            self._swap_runners()
        elif force_async:
            stock = import_module(ASYNC_SCHEDULER).AsyncScheduler
            _bind(SCHEDULER, "Scheduler", following_its_class(stock, async_scheduling=True))
        if swap != "none":
            self._swap_cache()

    def _swap_schedulers(self, force_async: bool, narrow: bool) -> None:
        from vllm_omni_sched import OmniScheduler, OmniSyncScheduler, compat

        if narrow:
            compat.native_windows = lambda module: False
        ours_async = as_workers_see_it(following_its_class(OmniScheduler, async_scheduling=True))
        ours_sync = as_workers_see_it(following_its_class(OmniSyncScheduler, async_scheduling=False))
        self.scheduler = ours_async if force_async else ours_sync
        _bind(SCHEDULER, "Scheduler", self.scheduler)
        _bind(ASYNC_SCHEDULER, "AsyncScheduler", ours_async)
        if _exists(DIFFUSION_SCHEDULER):
            # The same: for such a model they become schedulers over vLLM's own for diffusion LLMs.
            _bind(DIFFUSION_SCHEDULER, "DiffusionScheduler", ours_sync)
            _bind(DIFFUSION_SCHEDULER, "DiffusionAsyncScheduler", ours_async)

    def _swap_cache(self) -> None:
        from vllm_omni_sched import OmniEncoderCacheManager

        _bind(CACHE, "EncoderCacheManager", OmniEncoderCacheManager)
        _bind(SCHEDULER, "EncoderCacheManager", OmniEncoderCacheManager)
        init = OmniEncoderCacheManager.__init__

        def counted(manager: Any, *args: Any, **kwargs: Any) -> None:
            init(manager, *args, **kwargs)
            self.built[type(manager).__name__] += 1
            self.managers.append(manager)

        OmniEncoderCacheManager.__init__ = counted

    def _swap_runners(self) -> None:
        from vllm_omni_sched.engine.runners.v1 import RunnerV1Mixin
        from vllm_omni_sched.engine.runners.v2 import EncoderRunnerMixin, RunnerV2Mixin

        for module, name, mixin, methods in (
            (RUNNER_V1, "GPUModelRunner", RunnerV1Mixin, ("_gather_mm_embeddings",)),
            (RUNNER_V2, "GPUModelRunner", RunnerV2Mixin, ("add_requests",)),
            (ENCODER_RUNNER_V2, "EncoderRunner", EncoderRunnerMixin, ()),
        ):
            _bind(module, name, runner_with(getattr(import_module(module), name), mixin, methods))
            self._count_runners(mixin)

    def _count_runners(self, mixin: Any) -> None:
        prepare = mixin.omni_prepare

        def counted(runner: Any, config: Any) -> None:
            prepare(runner, config)
            self.built[mixin.__name__] += 1

        mixin.omni_prepare = counted

    def _count_schedulers(self) -> None:
        base = import_module(SCHEDULER).Scheduler
        init = base.__init__

        def counted(scheduler: Any, *args: Any, **kwargs: Any) -> None:
            init(scheduler, *args, **kwargs)
            self.built[f"{type(scheduler).__module__}.{type(scheduler).__name__}"] += 1

        base.__init__ = counted

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if self.parts.get(item.nodeid.split("::")[0], "") in item.name]
        for module in {item.getparent(pytest.Module).obj for item in items}:
            if module.__name__ in SHORTENED:
                steps = SHORTENED[module.__name__]
                module.range = lambda *args, steps=steps: range(*args)[:steps]

    @pytest.fixture(autouse=True)
    def conservation_laws(self, request: pytest.FixtureRequest) -> Iterator[None]:
        """Whether the caches that a test leaves behind still add up; recorded beside its outcome, not as part of it."""
        yield
        managers, self.managers = self.managers, []
        for manager in managers:
            self.validated += 1
            try:
                manager.validate()
            except AssertionError as broken:
                self._write(unbalanced=request.node.nodeid, message=str(broken))

    # Fixtures of vLLM's conftest, which is not loaded because it fetches assets.

    @pytest.fixture
    def caplog_vllm(self, caplog: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
        monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
        return caplog

    @pytest.fixture
    def default_vllm_config(self) -> Iterator[None]:
        from vllm.config import VllmConfig, set_current_vllm_config

        with set_current_vllm_config(VllmConfig()):
            yield

    @pytest.fixture
    def dist_init(self, tmp_path: Path, default_vllm_config: None) -> Iterator[None]:
        from vllm import distributed

        distributed.init_distributed_environment(1, 0, f"file://{tmp_path / 'store'}", 0, backend="gloo")
        distributed.initialize_model_parallel(1, 1)
        yield
        distributed.cleanup_dist_env_and_memory()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._record(report.nodeid, report.outcome, report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._record(report.nodeid, "failed", report)

    def _record(self, test: str, outcome: str, report: Any) -> None:
        self._write(test=test, outcome=outcome, message="" if outcome == "passed" else str(report.longrepr)[-2000:])

    def pytest_sessionfinish(self) -> None:
        deltas = getattr(self.scheduler, "num_deltas", 0)
        self._write(built=dict(self.built), validated=self.validated, deltas=deltas)
        if self.outcomes:
            self.outcomes.close()

    def _write(self, **line: Any) -> None:
        if self.outcomes:
            self.outcomes.write(json.dumps(line) + "\n")
            self.outcomes.flush()


def _pageable_memory_for_pinned() -> None:
    """Without an accelerator, buffers that want pinned memory take ordinary memory: same content, no device view."""
    import torch

    if torch.accelerator.is_available():
        return
    buffers = "vllm.v1.worker.gpu.buffer_utils"
    _bind(buffers, "UvaBuffer", import_module(buffers).NonUvaBuffer)
    torch.accelerator.synchronize = lambda *args, **kwargs: None


def _exists(module: str) -> bool:
    from importlib.util import find_spec

    return find_spec(module) is not None


def _bind(module: str, name: str, value: Any) -> None:
    setattr(import_module(module), name, value)
