"""Where vLLM-Omni lets us in: the method with which its engine makes its orchestrator."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from random import Random  # noqa: TID251 (made here, where the policies are put together)
from typing import Any

from vllm_omni_sched.stage_config import check_against, load_stage_config

logger = logging.getLogger(__name__)

_MARK = "__omni_sched__"


def hook() -> None:
    """Make the engine ask for our orchestrator, where options of ours are given; twice is fine."""
    from vllm_omni.engine.async_omni_engine import AsyncOmniEngine

    theirs = AsyncOmniEngine._create_orchestrator
    if not hasattr(theirs, _MARK):
        ours = functools.wraps(theirs)(_asks_first(theirs))
        setattr(ours, _MARK, True)
        AsyncOmniEngine._create_orchestrator = ours


def _asks_first(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def create_orchestrator(self: Any, **arguments: Any) -> Any:
        deploy = self._deploy_config_source
        config = load_stage_config(Path(deploy) if deploy else None, os.environ)
        if config is None:
            return theirs(self, **arguments)
        from vllm_omni_sched.omni.stages.graph import graph_of
        from vllm_omni_sched.omni.stages.orchestrator import ScheduledOrchestrator
        from vllm_omni_sched.omni.stages.policies import Policies

        graph = graph_of(arguments["stage_pools"])
        check_against(config, {stage.stage_id: stage.name for stage in graph.stages})
        policies = Policies(config, graph, bool(arguments["async_chunk"]), Random())
        logger.info("vllm-omni-sched schedules the stages %s", ", ".join(map(str, graph.stages)))
        made = ScheduledOrchestrator(policies=policies, runtime=self._runtime, **arguments)
        made.first_input_processor = getattr(self, "input_processor", None)
        return made

    return create_orchestrator
