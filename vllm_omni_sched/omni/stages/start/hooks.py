"""Hook into vLLM-Omni: its engine starts stages and makes its orchestrator, and its runtime plans the stages."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from random import Random  # noqa: TID251 (made here, where the driver are put together)
from typing import Any

from vllm_omni_sched import __version__
from vllm_omni_sched.config.checks import refuse
from vllm_omni_sched.config.stage_options import StageSchedConfig
from vllm_omni_sched.config.stage_yaml import file_named, load_stage_config
from vllm_omni_sched.graph.stages import StageGraph
from vllm_omni_sched.logs import get_logger
from vllm_omni_sched.omni.parked_requests import in_stages
from vllm_omni_sched.omni.stages.reports.stage_reporter import disable_reports, enable_reports

logger = get_logger(__name__)

_MARK = "__omni_sched__"


def hook() -> None:
    """Wrap methods of the engine and its runtime, which check for our options first; may be called twice."""
    from vllm_omni.engine.async_omni_engine import AsyncOmniEngine
    from vllm_omni.engine.stage_runtime import StageRuntime

    _wrap(AsyncOmniEngine, "_initialize_stages", _initialize_stages)
    _wrap(AsyncOmniEngine, "_create_orchestrator", _create_orchestrator)
    _wrap(StageRuntime, "_build_logical_stage_init_plans", _build_init_plans)


def _wrap(owner: type, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = getattr(owner, name)
    if not hasattr(original, _MARK):
        ours = functools.wraps(original)(wrapper(original))
        setattr(ours, _MARK, True)
        setattr(owner, name, ours)


def _options(config_path: str | None) -> tuple[StageSchedConfig | None, AbstractContextManager[None]]:
    """Return our options, None if there are none, and a context in which errors name their file.

    Args:
        config_path: of the deploy YAML that vLLM-Omni has resolved; its engine passes it to its runtime.
    """
    at = Path(config_path) if config_path else None, os.environ
    return load_stage_config(*at), file_named(*at)


def _initialize_stages(original: Callable[..., Any]) -> Callable[..., Any]:
    def initialize_stages(self: Any, *arguments: Any, **more: Any) -> Any:
        config, named = _options(self.config_path)
        if config is not None:
            from vllm_omni_sched.omni.stages.placement.initial_placement import assign_initial_devices
            from vllm_omni_sched.omni.stages.start.edges import check_reachable
            from vllm_omni_sched.omni.stages.start.plan import option_checks

            with named:
                refuse(option_checks(config))
                check_reachable(config)
                if config.graph.partition.enabled:
                    assign_initial_devices(config.graph.partition, self.stage_configs)
        in_stages(os.environ, config is not None)
        if config is not None and config.monitoring.enabled:
            enable_reports(os.environ)
        else:
            disable_reports(os.environ)
        return original(self, *arguments, **more)

    return initialize_stages


def _build_init_plans(original: Callable[..., Any]) -> Callable[..., Any]:
    def build_logical_stage_init_plans(self: Any, omni_transfer_config: Any, *others: Any) -> Any:
        config, named = _options(self._config_path)
        if config is not None:
            from vllm_omni.engine.stage_runtime import DistStageRuntime

            from vllm_omni_sched.omni.stages.start.plan import plan_stages

            with named:
                several = isinstance(self, DistStageRuntime)
                omni_transfer_config = plan_stages(
                    config, self._stage_configs, omni_transfer_config, several_hosts=several
                ).transfer
        return original(self, omni_transfer_config, *others)

    return build_logical_stage_init_plans


def _how(graph: StageGraph, async_chunk: bool) -> str:
    """Return when the stages of a request run."""
    if graph.chunked:
        return "those that exchange chunks at once, and each other one as soon as it has its inputs"
    if graph.branches:
        return "each as soon as it has its inputs"
    return "all stages of a request at once" if async_chunk else "one after the other"


def _create_orchestrator(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_orchestrator(self: Any, **arguments: Any) -> Any:
        config, _ = _options(self.config_path)
        if config is None:
            return original(self, **arguments)
        from vllm_omni_sched.omni.heartbeat import check_timeout
        from vllm_omni_sched.omni.stages.branches.orchestrator import BranchingOrchestrator
        from vllm_omni_sched.omni.stages.orchestrator import ScheduledOrchestrator
        from vllm_omni_sched.omni.stages.pipeline_driver import PipelineDriver
        from vllm_omni_sched.omni.stages.pool import ScheduledPool
        from vllm_omni_sched.omni.stages.start.front_end import check_requests
        from vllm_omni_sched.omni.stages.start.graph import check_handoffs, graph_of
        from vllm_omni_sched.omni.stages.start.overrides import check_overrides

        check_timeout(self._runtime, os.environ)
        check_overrides(ScheduledOrchestrator)
        check_overrides(BranchingOrchestrator)
        check_overrides(ScheduledPool)
        graph = graph_of(arguments["stage_pools"])
        check_handoffs(graph, arguments["stage_pools"], arguments.get("pd_config"))
        driver = PipelineDriver(config, graph, bool(arguments["async_chunk"]), Random())
        logger.info(
            "vllm-omni-sched %s schedules the stages %s of a pipeline, %s. Options given: %s.",
            __version__,
            ", ".join(map(str, graph.stages)),
            _how(graph, bool(arguments["async_chunk"])),
            json.dumps(config.model_dump(mode="json", exclude_unset=True)),
        )
        orchestrator = (BranchingOrchestrator if graph.branches else ScheduledOrchestrator)(
            driver=driver,
            runtime=self._runtime,
            first_input_processor=getattr(self, "input_processor", None),
            **arguments,
        )
        check_requests(self, config.graph.priority)
        return orchestrator

    return create_orchestrator
