"""The options of an engine: those that the operator gave, and those of the profile that this engine can have."""

import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from vllm_omni_sched import compat
from vllm_omni_sched.config.extras import how_to_install
from vllm_omni_sched.config.load import load_config
from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.resource.engine.lane import LaneFacts
from vllm_omni_sched.resource.engine.profile import VIDEO_LOADER, Fitted, FrontEndFacts, fit_profile

LANE_CONNECTOR = "vllm_omni_sched.engine.ahead.connector"
"""Module of the connector through which a lane hands over its encodings."""

MULTI_CONNECTOR = "vllm_omni_sched.engine.ahead.multi"
"""Module of the connector that stands for a lane and the operator's own connector."""

OPERATORS = "omni_sched_operators_config"
"""Key in ``ec_connector_extra_config`` of `MULTI_CONNECTOR`: the operator's own `ECTransferConfig`."""

ENGINES = "omni_sched_engines"
"""Key in ``ec_connector_extra_config`` of both: the number of engines that data parallelism starts. vLLM tells each of
these engines that it is the only one, unless its model has experts."""

LOADER_VARIABLE = "VLLM_VIDEO_LOADER_BACKEND"


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
    config, rust = load_config(vllm_config.additional_config), compat.rust_front_end()
    if not (config.from_profile() or rust):
        return Fitted(config)
    multimodal = getattr(vllm_config.model_config, "multimodal_config", None)
    return fit_profile(
        config, lane_facts(vllm_config), front_end_facts(getattr(multimodal, "media_io_kwargs", None), rust=rust)
    )


def front_end_facts(media_io_kwargs: Any, *, rust: bool | None = None) -> FrontEndFacts:
    """Return the facts about the process that takes the requests.

    Args:
        media_io_kwargs: vLLM's argument, or what vLLM has made of it.
        rust: whether vLLM's front end in Rust serves; None to look.
    """
    video = video_arguments(media_io_kwargs)
    named, decoder = video.get("video_backend"), video.get("backend")
    variable = os.environ.get(LOADER_VARIABLE)
    if named and named != VIDEO_LOADER:
        chosen = f"--media-io-kwargs or the configuration of the model name the loader {named!r}"
    elif variable and variable != VIDEO_LOADER:
        chosen = f"{LOADER_VARIABLE} names the loader {variable!r}"
    elif decoder is not None and named != VIDEO_LOADER:
        chosen = f"--media-io-kwargs name the decoder {decoder!r}"
    else:
        chosen = ""
    missing = "" if find_spec("av") is not None else how_to_install("video")
    return FrontEndFacts(compat.rust_front_end() if rust is None else rust, chosen, missing)


def video_arguments(media_io_kwargs: Any) -> dict[str, Any]:
    """Return the arguments for videos among vLLM's ``--media-io-kwargs``."""
    video = media_io_kwargs.get("video") if isinstance(media_io_kwargs, Mapping) else None
    return dict(video) if isinstance(video, Mapping) else {}  # vLLM refuses other types


def lane_facts(vllm_config: Any) -> LaneFacts:
    """Read from vLLM's configuration the facts that decide whether this engine may encode ahead."""
    parallel, model_config = vllm_config.parallel_config, vllm_config.model_config
    operators = operators_connector(vllm_config.ec_transfer_config)
    multimodal, device = bool(model_config.is_multimodal_model), vllm_config.device_config.device_type
    # Only on CUDA does the class of the model matter, which vLLM's front end needs later in any case.
    cls = compat.model_class(model_config) if multimodal and device == "cuda" else None
    items = getattr(getattr(model_config, "multimodal_config", None), "mm_processor_cache_type", None)
    return LaneFacts(
        multimodal=multimodal,
        workers=parallel.tensor_parallel_size,
        groups=parallel.world_size // parallel.tensor_parallel_size,
        spread=not compat.workers_on_one_host(vllm_config),
        device=device,
        vllm=str(compat.vllm_version()),
        connectors_hold_back=compat.ec_connectors_hold_back(),
        runner_runs_connectors=not getattr(vllm_config, "use_v2_model_runner", False)
        or compat.runner_v2_runs_ec_connectors(),
        reports_of_all_workers=compat.ec_reports_of_all_workers(),
        compiled_encoder=bool(getattr(vllm_config.compilation_config, "compile_mm_encoder", False)),
        graphs_of_unknown_sizes=compat.encoder_graph_embeds(vllm_config) is None,
        encodes_only=operators is not None and operators.ec_role == "ec_producer",
        encoder_lora=bool(getattr(vllm_config.lora_config, "enable_tower_connector_lora", False)),
        encoder_decoder=bool(model_config.is_encoder_decoder),
        sets_context="" if cls is None else compat.sets_forward_context(cls),
        one_buffer=compat.encoder_attention_in_one_buffer(vllm_config),
        items_with_workers=items == "shm",
    )


def operators_connector(ec_transfer_config: Any) -> Any:
    """Return the operator's own `ECTransferConfig`, also when ours is in its place; None if no connector is named."""
    if ec_transfer_config is None or ec_transfer_config.ec_connector is None:
        return None
    if ec_transfer_config.ec_connector_module_path == LANE_CONNECTOR:
        return None
    return ec_transfer_config.ec_connector_extra_config.get(OPERATORS, ec_transfer_config)
