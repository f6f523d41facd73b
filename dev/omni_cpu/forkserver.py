"""Stages forked from a server that has imported vLLM.

vLLM-Omni spawns each stage, and importing vLLM and vLLM-Omni costs a stage a quarter of a minute of CPU before it does
anything. The server imports them once, for all stages of all pipelines, beside the front end's own import. All else is
as it was: a stage is a process of its own, its configuration arrives pickled, and it has the environment that the front
end had when it started the stage (plugins leave word for stages there).
"""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess

from dev.fork_spawned import fork_what_is_spawned

PRELOAD = [
    "vllm.v1.attention.backends.cpu_attn",
    "vllm_omni.diffusion.stage_diffusion_proc",
    "vllm_omni.diffusion.worker.diffusion_worker",
    "vllm_omni.engine.arg_utils",
    "vllm_omni.engine.stage_engine_core_proc",
    "dev.omni_cpu.models",
    "dev.omni_cpu.pictures",
    "dev.omni_cpu.platform",
    "dev.omni_cpu.processors",
    "dev.omni_cpu.workers",
]
LAST = "dev.omni_cpu.frozen"
WORKERS_APART = "VLLM_ENABLE_V1_MULTIPROCESSING"
"""Variable that is 1 if a stage starts its worker in another process."""


class _Stage(ForkServerProcess):
    def start(self) -> None:
        self._environment = dict(os.environ)  # that of the server is older
        super().start()

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        if os.environ.get(WORKERS_APART) == "1":
            fork_what_is_spawned()
        super().run()


class _Context(ForkServerContext):
    Process = _Stage


def start(*modules: str) -> None:
    """Start the fork server, which imports vLLM and `modules` while this process imports vLLM."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([*PRELOAD, *modules, LAST])
    forkserver.ensure_running()


def use_for_stages() -> None:
    """Once this process has imported vLLM-Omni."""
    from vllm_omni.diffusion import stage_diffusion_proc
    from vllm_omni.engine import stage_engine_core_proc_manager

    stage_engine_core_proc_manager.get_mp_context = stage_diffusion_proc.get_mp_context = _Context
