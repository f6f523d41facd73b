"""The options of an engine: those that the operator gave, and those of the profile that this engine can have."""

from typing import Any

from vllm_omni_sched import compat
from vllm_omni_sched.config.load import load_config
from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.resource.engine.lane import LaneFacts
from vllm_omni_sched.resource.engine.profile import Fitted, fit_profile

LANE_CONNECTOR = "vllm_omni_sched.engine.ahead.connector"
"""Module of the connector through which a lane hands over its encodings."""

MULTI_CONNECTOR = "vllm_omni_sched.engine.ahead.multi"
"""Module of the connector that stands for a lane and the operator's own connector."""

OPERATORS = "omni_sched_operators_config"
"""Key in ``ec_connector_extra_config`` of `MULTI_CONNECTOR`: the operator's own `ECTransferConfig`."""

ENGINES = "omni_sched_engines"
"""Key in ``ec_connector_extra_config`` of both: the number of engines that data parallelism starts. vLLM tells each of
these engines that it is the only one, unless its model has experts."""


def engine_options(vllm_config: Any) -> OmniSchedConfig:
    """Return the options that this engine runs under; the same in the front end, the engine core and the workers.

    Raises:
        ConfigError: the options of `additional_config` are invalid.
    """
    return fitted_options(vllm_config).config


def fitted_options(vllm_config: Any) -> Fitted:
    """Return the options that this engine runs under, and what of its profile it cannot have.

    Raises:
        ConfigError: the options of `additional_config` are invalid.
    """
    config = load_config(vllm_config.additional_config)
    return fit_profile(config, lane_facts(vllm_config)) if config.from_profile() else Fitted(config)


def lane_facts(vllm_config: Any) -> LaneFacts:
    """Read from vLLM's configuration the facts that decide whether this engine may encode ahead."""
    parallel = vllm_config.parallel_config
    operators = operators_connector(vllm_config.ec_transfer_config)
    return LaneFacts(
        multimodal=bool(vllm_config.model_config.is_multimodal_model),
        workers=parallel.tensor_parallel_size,
        groups=parallel.world_size // parallel.tensor_parallel_size,
        spread=not compat.workers_on_one_host(vllm_config),
        device=vllm_config.device_config.device_type,
        vllm=str(compat.vllm_version()),
        connectors_hold_back=compat.ec_connectors_hold_back(),
        runner_runs_connectors=not getattr(vllm_config, "use_v2_model_runner", False)
        or compat.runner_v2_runs_ec_connectors(),
        reports_of_all_workers=compat.ec_reports_of_all_workers(),
        compiled_encoder=bool(getattr(vllm_config.compilation_config, "compile_mm_encoder", False)),
        graphs_of_unknown_sizes=compat.encoder_graph_embeds(vllm_config) is None,
        encodes_only=operators is not None and operators.ec_role == "ec_producer",
        encoder_lora=bool(getattr(vllm_config.lora_config, "enable_tower_connector_lora", False)),
        encoder_decoder=bool(vllm_config.model_config.is_encoder_decoder),
        weights_change=vllm_config.weight_transfer_config is not None,
    )


def operators_connector(ec_transfer_config: Any) -> Any:
    """Return the operator's own `ECTransferConfig`, also when ours is in its place; None if no connector is named."""
    if ec_transfer_config is None or ec_transfer_config.ec_connector is None:
        return None
    if ec_transfer_config.ec_connector_module_path == LANE_CONNECTOR:
        return None
    return ec_transfer_config.ec_connector_extra_config.get(OPERATORS, ec_transfer_config)
