"""Resolve a deploy YAML like vLLM-Omni, without starting anything."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_omni_sched.config.errors import ConfigError


@dataclass(frozen=True)
class Deployed:
    """Hold what vLLM-Omni reads in a deploy YAML: the configs of all stages, and its `OmniTransferConfig` or None."""

    stage_configs: list[Any]
    transfer: Any
    async_chunk: bool


def load_plugins() -> None:
    """Let plugins register their pipelines and connectors, as at the start of a pipeline."""
    from vllm.plugins import load_general_plugins
    from vllm_omni.plugins import load_omni_general_plugins

    load_omni_general_plugins()
    load_general_plugins()


def deployed(deploy_yaml: Path, model: str | None) -> Deployed | None:
    """Return the pipeline that a deploy YAML starts.

    Args:
        deploy_yaml: vLLM-Omni's.
        model: the served model, which determines the pipeline if the deploy YAML names none.

    Returns:
        None if the file names no pipeline and no `model` is given.

    Raises:
        ConfigError: vLLM-Omni cannot read the file, or knows no such pipeline. The message names the file.
    """
    from vllm_omni.config.omni_config import VllmOmniConfig
    from vllm_omni.config.stage_config import load_deploy_config, resolve_deploy_yaml
    from vllm_omni.distributed.omni_connectors import load_omni_transfer_config

    try:
        deploy = load_deploy_config(deploy_yaml)
        transfer = load_omni_transfer_config(config_dict=resolve_deploy_yaml(deploy_yaml))
        pipeline = _pipeline(deploy.pipeline, model, deploy_yaml)
        if pipeline is None:
            return None
        whole = VllmOmniConfig.from_pipeline_config(
            pipeline,
            user_deploy_config=deploy,
            deploy_config_path=str(deploy_yaml),
            cli_overrides={} if model is None else {"model": model},
        )
    except Exception as error:  # noqa: BLE001 - whatever vLLM-Omni raises is what would stop its server
        raise ConfigError(f"{deploy_yaml}: vLLM-Omni refuses it: {type(error).__name__}: {error}") from None
    return Deployed(list(whole.stage_configs), transfer, bool(deploy.async_chunk))


def _pipeline(name: str | None, model: str | None, deploy_yaml: Path) -> Any:
    """Return vLLM-Omni's `PipelineConfig`; None if neither the file nor a model determines it."""
    from vllm_omni.config.config_factory import StageConfigFactory
    from vllm_omni.config.pipeline_registry import OMNI_PIPELINES, resolve_pipeline_config

    if model is not None:
        found = StageConfigFactory.get_pipeline_config(
            model, trust_remote_code=False, deploy_config_path=str(deploy_yaml)
        )
        if found is None:
            raise ValueError(f"there is no pipeline for the model {model!r}")
        return found
    if name is None:
        return None
    if name not in OMNI_PIPELINES:
        raise ValueError(f"there is no pipeline {name!r}; it has {', '.join(sorted(OMNI_PIPELINES))}")
    return resolve_pipeline_config(name)
