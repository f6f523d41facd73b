"""Makes the `SchedulerExtension` of a scheduler from its options and from what this vLLM offers."""

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.request import RequestStatus

from vllm_omni_sched import compat
from vllm_omni_sched.compat import Status
from vllm_omni_sched.config.options import OmniSchedConfig, ReleaseMode
from vllm_omni_sched.engine import rebind
from vllm_omni_sched.engine.core_hooks import watch_core
from vllm_omni_sched.engine.encoder.cache import OmniEncoderCacheManager, manager_for
from vllm_omni_sched.engine.encoder.inputs import EncoderInputs
from vllm_omni_sched.engine.encoder.pending import PendingInputs
from vllm_omni_sched.engine.encoder.stuck import UnstuckInputs
from vllm_omni_sched.engine.extension import SchedulerExtension
from vllm_omni_sched.engine.metrics.bridge import MetricsPublisher
from vllm_omni_sched.engine.order import index_items, sort_update
from vllm_omni_sched.engine.refusals import Refusals
from vllm_omni_sched.engine.sessions import block_ids
from vllm_omni_sched.engine.sessions.messages import SessionSender
from vllm_omni_sched.engine.sessions.registry import Sessions
from vllm_omni_sched.engine.sessions.release import CommittedRelease
from vllm_omni_sched.engine.shared.attach import shared_planner
from vllm_omni_sched.engine.steered import SteeredSteps
from vllm_omni_sched.items.feature_list import Strip
from vllm_omni_sched.monitor.counts import SchedulerMetrics


def build_extension(scheduler: Any, config: OmniSchedConfig, features: Mapping[str, Status]) -> SchedulerExtension:
    """Return the extension of a scheduler that vLLM has just constructed; its encoder cache manager may be replaced.

    Args:
        scheduler: one of our schedulers.
        config: its options.
        features: status of each feature with this version of vLLM.

    Raises:
        ConfigError: an option does not fit this engine.
        MissingSymbolError: a feature is ``on`` that cannot work.
    """
    active = {name for name, status in features.items() if status.active}
    model_config = scheduler.vllm_config.model_config
    uses_mrope = getattr(scheduler, "model_uses_mrope", False) or model_config.uses_mrope
    runner_v2 = bool(getattr(scheduler, "use_v2_model_runner", False))
    native_windows = compat.native_windows(compat.SCHEDULER)
    rebind.bind(active)
    if "encoder_cache" in active:
        scheduler.encoder_cache_manager = manager_for(scheduler.encoder_cache_manager, config, model_config)

    strip_one = compat.strip_feature()

    def strip(feature: Any) -> Any:
        return strip_one(feature, uses_mrope)

    metrics, refusals = SchedulerMetrics(), Refusals()
    inputs = _inputs(
        scheduler,
        narrows="windows" in active and not scheduler.is_encoder_decoder,
        native_windows=native_windows,
        running=RequestStatus.RUNNING,
        index=index_items,
        metrics=metrics,
    )
    sender = None
    if "session_delta" in active and compat.workers_take_deltas(scheduler.vllm_config, config):
        sender = SessionSender(strip, metrics)
    steered = SteeredSteps(scheduler, config, metrics, inputs, refusals, strip)
    shared = shared_planner(scheduler)
    if shared is not None:
        shared.bind(getattr(scheduler.encoder_cache_manager, "cached", ()))
    keepers = [one for one in (steered.planner, shared) if one is not None]
    if keepers:
        watch_core()
    publisher = _publisher(scheduler, config, metrics, sender, keepers)
    if publisher is not None:
        weakref.finalize(scheduler, publisher.close)
    return SchedulerExtension(
        metrics,
        inputs,
        _sessions(scheduler, config, metrics, refusals, sender, strip),
        refusals,
        sort_update,
        pending=PendingInputs(by_range="pending_range" in active and not scheduler.is_encoder_decoder, strip=strip)
        if runner_v2 and compat.has_pending_inputs()
        else None,
        policies=steered if steered.active else None,
        # Policies that look ahead, searches that walk all items, and KV events query the index of every request.
        index_all=not native_windows or steered.looks_ahead or scheduler.enable_kv_cache_events,
        gives_back=not runner_v2,
        publisher=publisher,
        keepers=keepers,
    )


def _inputs(scheduler: Any, **how: Any) -> EncoderInputs:
    """Return what decides encoder inputs; with the rules for requests that wait for ever where there can be any."""
    settings = scheduler.scheduler_config
    threshold = settings.long_prefill_token_threshold if settings.disable_chunked_mm_input else 0
    drafts_wait = compat.read_ahead_of(scheduler) > 0 and compat.keeps_encodings_for_drafts()
    if not threshold and not drafts_wait:
        return EncoderInputs(**how)
    whole_from_start = compat.has_pending_inputs()  # as new as that
    return UnstuckInputs(threshold=threshold, whole_from_start=whole_from_start, drafts_wait=drafts_wait, **how)


def _sessions(
    scheduler: Any,
    config: OmniSchedConfig,
    metrics: SchedulerMetrics,
    refusals: Refusals,
    sender: SessionSender | None,
    strip: Strip,
) -> Sessions:
    if sender is None:
        return Sessions(refusals)
    # Only items behind the frontier may leave memory, and only deltas move the frontier.
    release = CommittedRelease(config, strip, metrics) if config.release is ReleaseMode.SPILL else None
    track = None
    if scheduler.connector is None:
        track = partial(block_ids.look_up_lazily, scheduler.kv_cache_manager, sender.trackers)
    return Sessions(refusals, sender, release, track)


def _publisher(
    scheduler: Any,
    config: OmniSchedConfig,
    metrics: SchedulerMetrics,
    sender: SessionSender | None,
    planners: Sequence[Any],
) -> MetricsPublisher | None:
    if not (config.metrics and scheduler.log_stats):
        return None
    publisher = MetricsPublisher(
        metrics,
        scheduler.vllm_config,
        interval_seconds=config.metrics_interval_seconds,
        refresh=partial(refresh, metrics, scheduler.encoder_cache_manager, sender, planners),
    )
    publisher.start()
    return publisher


def refresh(
    metrics: SchedulerMetrics, manager: EncoderCacheManager, sender: SessionSender | None, planners: Sequence[Any] = ()
) -> None:
    """Copy the counts of other objects into ``metrics`` when they are published, so that steps pay nothing for it."""
    if isinstance(manager, OmniEncoderCacheManager):
        manager.count_into(metrics)
    if sender is not None:
        metrics.sessions = len(sender)
    for planner in planners:
        planner.count_into(metrics)
