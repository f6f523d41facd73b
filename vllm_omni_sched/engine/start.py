"""Start of an engine: checks and set-up in the front-end process, and the log line of the scheduler."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllm_omni_sched import __version__, compat
from vllm_omni_sched.compat import Status
from vllm_omni_sched.config.checks import refuse
from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.load import Source, load_config, resolved, written
from vllm_omni_sched.config.options import OmniSchedConfig, Toggle
from vllm_omni_sched.config.profiles import MEANINGS, PROFILES, Profile
from vllm_omni_sched.engine import unsent
from vllm_omni_sched.engine.checks import option_checks
from vllm_omni_sched.engine.fitted import (
    ENGINES,
    LANE_CONNECTOR,
    MULTI_CONNECTOR,
    OPERATORS,
    engine_options,
    lane_facts,
    operators_connector,
)
from vllm_omni_sched.engine.front_end import check_requests
from vllm_omni_sched.engine.lending.facts import lending_engine
from vllm_omni_sched.engine.metrics import bridge as metrics_bridge
from vllm_omni_sched.engine.preprocess.start import prepare, preprocess_options
from vllm_omni_sched.engine.shared.attach import attach_shared_encodings
from vllm_omni_sched.logs import get_logger
from vllm_omni_sched.resource.engine.lane import refusal
from vllm_omni_sched.resource.engine.lending import refuse_lending
from vllm_omni_sched.resource.engine.profile import VIDEO_LOADER, Fitted, front_end_refusal

logger = get_logger(__name__)


def check_and_attach(vllm_config: Any) -> None:
    """Refuse options that cannot work, then add our metrics to ``/metrics`` and check requests in this process.

    Raises:
        ConfigError: an option is unknown, of the wrong type or out of range, or is ``on`` for a model that has no use
            for it; or `OmniSyncScheduler` was named under async scheduling.
        UnsupportedVllmError: this version of vLLM is not supported.
        MissingSymbolError: a feature is ``on`` that cannot work with this vLLM.
    """
    refuse(option_checks(load_config(vllm_config.additional_config), vllm_config.device_config.device_type))
    config = engine_options(vllm_config)
    preprocess = preprocess_options(config)
    if compat.rust_front_end() and (why := front_end_refusal(config, processes=preprocess.processes)) is not None:
        raise ConfigError(why)
    prepare(vllm_config, preprocess)
    scheduler_cls = vllm_config.scheduler_config.scheduler_cls
    name = scheduler_cls if isinstance(scheduler_cls, str) else scheduler_cls.__name__
    if name.rsplit(".", 1)[-1] == "OmniSyncScheduler" and vllm_config.scheduler_config.async_scheduling:
        raise ConfigError(
            "--scheduler-cls names OmniSyncScheduler, but async scheduling is on: name vllm_omni_sched.OmniScheduler "
            "(it takes either), or add --no-async-scheduling"
        )
    if config.mrope_append is Toggle.ON:
        from vllm_omni_sched.engine.runners.mrope import refuse_if_on, why_not

        refuse_if_on(config, why_not(config, vllm_config))
    if config.encoder_cache is not Toggle.OFF:
        from vllm_omni_sched.engine.encoder.cache import refuse_encoder_decoder

        refuse_encoder_decoder(config, vllm_config.model_config)
    if config.encode_rounds:
        from vllm_omni_sched.engine.steered import refuse_rounds

        refuse_rounds(config, vllm_config.model_config)
    refuse_lending(config.kv_lending, lending_engine(config, vllm_config))
    if config.encoder_share_bytes:
        attach_shared_encodings(vllm_config)
    if config.encode_ahead:
        attach_encode_ahead(vllm_config)
    if config.metrics:
        metrics_bridge.attach()
    check_requests()
    unsent.attach()
    for name in config.misplaced:
        logger.warning(
            "Option %r belongs to the group 'expert': write it as %r. It is still read where it is.",
            name,
            written(OmniSchedConfig, name),
        )


def attach_encode_ahead(vllm_config: Any) -> None:
    """Configure the encode-ahead connector for this engine, unless its model is not multimodal.

    A connector that the operator named stays in use: ours is put in its place, with its role, and asks it first.

    Raises:
        ConfigError: the engine cannot encode ahead, for the reason of `refusal`.
    """
    facts = lane_facts(vllm_config)
    why_not = refusal(facts)
    if why_not is not None:
        raise ConfigError(why_not)
    if not facts.multimodal:
        return
    from vllm.config import ECTransferConfig

    graph_embeds = compat.encoder_graph_embeds(vllm_config)
    if graph_embeds:
        logger.info(
            "Encode-ahead leaves items of up to %d embeddings to the step, which encodes them by a CUDA graph.",
            graph_embeds,
        )
    if getattr(vllm_config.model_config.multimodal_config, "mm_processor_cache_type", None) == "shm":
        logger.warning(
            "Encode-ahead leaves all items to the step, because the processor cache keeps them in shared memory, which "
            "belongs to the workers: name --mm-processor-cache-type lru to have them encoded ahead."
        )
    operators = operators_connector(vllm_config.ec_transfer_config)
    engines = {ENGINES: vllm_config.parallel_config.data_parallel_size}
    if operators is None:
        vllm_config.ec_transfer_config = ECTransferConfig(
            ec_connector="EncodeAheadConnector",
            ec_role="ec_both",
            ec_connector_module_path=LANE_CONNECTOR,
            ec_connector_extra_config=engines,
        )
        return
    logger.info("Encode-ahead asks %s first, and encodes in the lane what it does not have.", operators.ec_connector)
    vllm_config.ec_transfer_config = replace(
        operators,
        ec_connector="EncodeAheadMultiConnector",
        ec_connector_module_path=MULTI_CONNECTOR,
        ec_connector_extra_config={**operators.ec_connector_extra_config, OPERATORS: operators, **engines},
    )


# -- in the engine core ----------------------------------------------------


def start_line(scheduler: Any, fitted: Fitted, features: Mapping[str, Status]) -> str:
    """Return one line: version, scheduler, what the profile turned on and left out, given options, and features.

    Args:
        scheduler: one of our schedulers, after its setup.
        fitted: the options of the engine.
        features: status of each feature with this version of vLLM.
    """
    vllm_config, config = scheduler.vllm_config, fitted.config
    stage = getattr(vllm_config.model_config, "stage_id", None)
    idle = _idle(scheduler)
    on = [name for name, status in features.items() if status.active and name not in idle]
    off = [
        f"{name} ({status.reason if not status.active else idle[name]})"
        for name, status in features.items()
        if name not in on
    ]
    cls = vllm_config.scheduler_config.scheduler_cls or type(scheduler)  # as the operator has named it
    named = cls if isinstance(cls, str) else f"{cls.__module__}.{cls.__qualname__}"
    given = [str(one) for one in resolved(config) if one.given]
    left_out = [str(one) for one in fitted.withheld]
    return " ".join(
        (
            f"vllm-omni-sched {__version__} schedules {'this engine' if stage is None else f'stage {stage}'} on vLLM "
            f"{compat.vllm_version()}: {named}, {_asynchronous(vllm_config)}.",
            *_of_profile(fitted),
            *([f"Left out: {'; '.join(left_out)}."] if left_out else []),
            f"Options given: {', '.join(given) or 'none'}. "
            f"Features on: {', '.join(on) or 'none'}; off: {', '.join(off) or 'none'}.",
        )
    )


def _of_profile(fitted: Fitted) -> list[str]:
    """Return what the profile of an engine has turned on, in words; nothing for the one that turns nothing on."""
    config = fitted.config
    if config.profile is Profile.EXACT:
        return []
    off = {one.option for one in fitted.withheld}
    chosen = [one for one in resolved(config) if one.source is Source.PROFILE and one.name not in off]
    said = [f"{MEANINGS[one.name]} ({one})" for one in chosen if one.name in MEANINGS]
    if fitted.video_loader:
        said.append(f"videos are decoded by {VIDEO_LOADER}")
    targets = ", ".join(str(one) for one in chosen if one.name not in MEANINGS)
    if targets:
        said.append(f"targets are {targets}")
    traffic = PROFILES[config.profile].traffic
    return [f"Profile {config.profile.value}, for {traffic}: {'; '.join(said) or 'nothing that is not set already'}."]


def _asynchronous(vllm_config: Any) -> str:
    """Return whether scheduling is asynchronous, and if it is not, why."""
    if vllm_config.scheduler_config.async_scheduling:
        return "with async scheduling"
    if vllm_config.device_config.device_type == "cpu":
        why = "which vLLM always turns off on CPUs"
    elif vllm_config.model_config.runner_type == "pooling":
        why = "which vLLM turns off for pooling models"
    else:
        why = "which --no-async-scheduling or vLLM, as its log then says, has turned off"
    return f"without async scheduling, {why} (vLLM's warning about subclasses of Scheduler can be ignored)"


def _idle(scheduler: Any) -> dict[str, str]:
    """Return the features that this vLLM supports and this engine does not use, with the reasons."""
    why = {}
    if scheduler.is_encoder_decoder:
        why["windows"] = why["pending_range"] = "an encoder-decoder model has one item"
    elif not getattr(scheduler, "use_v2_model_runner", False):
        why["pending_range"] = "for model runner V2 only"
    if scheduler.omni.sessions.sender is None:
        why["session_delta"] = "the workers of this platform do not take deltas"
        why["mrope_append"] = "needs session_delta"
    elif not scheduler.vllm_config.model_config.uses_mrope:
        why["mrope_append"] = "this model has no M-RoPE positions"
    return why
