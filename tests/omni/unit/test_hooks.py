"""Where vLLM-Omni lets us in: with options ours, without them vLLM-Omni as it is."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from vllm_omni.engine.async_omni_engine import AsyncOmniEngine
from vllm_omni.engine.orchestrator import Orchestrator
from vllm_omni.engine.stage_pool import StagePool
from vllm_omni.engine.stage_runtime import StageRuntime

from tests.support.omni_stages import FINAL, Edges, StageSpec, pool_of
from vllm_omni_sched import __version__
from vllm_omni_sched.config.errors import ConfigError, MissingSymbolError
from vllm_omni_sched.config.stage_yaml import VARIABLE
from vllm_omni_sched.logs import LOGGER
from vllm_omni_sched.omni.stages.branches.orchestrator import BranchingOrchestrator
from vllm_omni_sched.omni.stages.orchestrator import ScheduledOrchestrator
from vllm_omni_sched.omni.stages.pipeline_driver import PipelineDriver
from vllm_omni_sched.omni.stages.pool import ScheduledPool
from vllm_omni_sched.omni.stages.start import hooks, overrides

pytestmark = pytest.mark.omni

Make = Callable[[str | None], Any]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Make:
    """The orchestrator that the engine makes with such a deploy YAML; None: there is no YAML."""
    monkeypatch.setattr(AsyncOmniEngine, "_create_orchestrator", AsyncOmniEngine._create_orchestrator)
    monkeypatch.setattr(PipelineDriver, "publish", lambda self: SimpleNamespace(close=lambda: None))
    monkeypatch.delenv(VARIABLE, raising=False)
    hooks.hook()

    def made(text: str | None) -> Any:
        deploy = tmp_path / "deploy.yaml"
        if text is not None:
            deploy.write_text(text)
        stages = (StageSpec(), FINAL)
        engine = SimpleNamespace(config_path=str(deploy) if text is not None else None, _runtime=object())
        return AsyncOmniEngine._create_orchestrator(
            engine,
            request_async_queue=asyncio.Queue(),
            output_async_queue=asyncio.Queue(),
            rpc_async_queue=asyncio.Queue(),
            stage_pools=[pool_of(i, stages, Edges()) for i in range(2)],
            async_chunk=False,
        )

    return made


@pytest.mark.parametrize("text", [None, "stages: []\n", "omni_sched: false\n"])
def test_without_options_all_is_as_it_was(make: Make, text: str | None) -> None:
    found = make(text)
    assert type(found) is Orchestrator
    assert [type(pool) for pool in found.stage_pools] == [StagePool, StagePool]
    assert type(found.output_async_queue) is asyncio.Queue


@pytest.mark.parametrize(
    "text", ["omni_sched:\n", "omni_sched: {}\n", "omni_sched: {balancing: {policy: least-queue}}\n"]
)
def test_with_options_the_orchestrator_is_ours(make: Make, text: str) -> None:
    found = make(text)
    assert type(found) is ScheduledOrchestrator
    assert [type(pool) for pool in found.stage_pools] == [ScheduledPool, ScheduledPool]


def test_one_line_says_that_it_is_and_with_which_options(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger=LOGGER):
        make("omni_sched: {balancing: {policy: least-queue}, graph: {merging: {enabled: false}}}\n")
    (line,) = [one.getMessage() for one in caplog.records if "schedules the stages" in one.getMessage()]
    assert line.startswith(f"vllm-omni-sched {__version__} schedules the stages ")
    assert 'given: {"graph": {"merging": {"enabled": false}}, "balancing": {"policy": "least-queue"}}.' in line


def test_or_the_environment_gives_the_options(make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("balancing: {policy: least-queue}\n")
    monkeypatch.setenv(VARIABLE, str(file))
    assert make(None).driver.config.balancing.policy == "least-queue"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("omni_sched: {batching: {max_batch_sice: 2}}\n", "max_batch_sice"),
        ("omni_sched: {balancing: {policy: best}}\n", "policy"),
        ("omni_sched: [1]\n", "mapping"),
    ],
)
def test_bad_options_are_refused_with_what_is_wrong(make: Make, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make(text)


@pytest.mark.parametrize(("ours", "theirs"), [(ScheduledOrchestrator, Orchestrator), (ScheduledPool, StagePool)])
def test_every_method_that_vllm_omni_has_too_is_guarded(ours: type, theirs: type) -> None:
    both = {name for name in vars(ours) if callable(getattr(theirs, name, None))} - set(vars(object))
    assert both
    assert set(overrides.overridden_methods(ours)) - {"__init__"} == both
    overrides.check_overrides(ours)


def test_every_method_of_vllm_omni_is_guarded_that_branches_need() -> None:
    ours = {name for name in vars(BranchingOrchestrator) if callable(getattr(Orchestrator, name, None))}
    assert {*overrides.overridden_methods(BranchingOrchestrator), *BranchingOrchestrator.REPLACES} >= ours - {
        *vars(object)
    }
    overrides.check_overrides(BranchingOrchestrator)


def test_a_method_that_vllm_omni_has_no_more_is_told(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = next(one for one in Orchestrator.__mro__ if "_emit_tx_edge" in vars(one))
    monkeypatch.delattr(owner, "_emit_tx_edge")
    with pytest.raises(MissingSymbolError, match=r"extends Orchestrator\._emit_tx_edge, which vLLM-Omni \d+\.\d+"):
        make("omni_sched: {}\n")
    assert type(make(None)) is Orchestrator


def test_only_what_calls_that_of_its_base_is_guarded() -> None:
    class Base:
        def kept(self) -> None: ...

    class Ours(Base):
        def kept(self) -> None:
            super().kept()

        def own(self) -> None:
            self.kept()

        async def renamed(self) -> None:
            super().renamed()  # type: ignore[misc]

    assert overrides.overridden_methods(Ours) == ["kept", "renamed"]
    with pytest.raises(MissingSymbolError, match=r"extends Base\.renamed, which"):
        overrides.check_overrides(Ours)


def test_hooking_twice_is_hooking_once(make: Make) -> None:
    once = AsyncOmniEngine._create_orchestrator
    hooks.hook()
    assert AsyncOmniEngine._create_orchestrator is once


def test_the_engine_and_its_runtime_read_the_same_file() -> None:
    """vLLM-Omni hands the engine's path on to the runtime; if that changes, the options may come from two files."""
    source = inspect.getsource(inspect.unwrap(AsyncOmniEngine._initialize_stages))
    assert "config_path=self.config_path" in source
    assert "self._config_path = config_path" in inspect.getsource(StageRuntime.__init__)
