"""A pipeline while it runs, started by vLLM-Omni's own `AsyncOmni` or `Omni`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dev.omni_cpu.deploy import write_deploy
from dev.omni_cpu.forkserver import WORKERS_APART
from dev.omni_cpu.spec import PipelineSpec

START_SECONDS = 900  # a busy machine is slow


@contextmanager
def running(spec: PipelineSpec, *, model: Path, folder: Path) -> Iterator[Any]:
    """Run a pipeline in a process that has `distribution.environment`; files of the run go to `folder`."""
    from vllm_omni.entrypoints.async_omni import AsyncOmni
    from vllm_omni.entrypoints.omni import Omni
    from vllm_omni.plugins import load_omni_general_plugins

    load_omni_general_plugins()  # AsyncOmni looks for the pipeline before it loads the plugin that registers it
    # else vLLM moves each worker to a process of its own, for OpenMP's sake
    os.environ[WORKERS_APART] = str(int(spec.workers))
    omni = {"AsyncOmni": AsyncOmni, "Omni": Omni}[spec.entrypoint](
        model=str(model),
        deploy_config=str(write_deploy(spec, folder / "deploy.yaml")),
        stage_init_timeout=START_SECONDS,
        init_timeout=START_SECONDS,
        parallel_stage_init=True,  # else stages of one device start one after the other
    )
    try:
        yield omni
    finally:
        omni.shutdown()
