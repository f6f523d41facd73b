"""The features that can work on this vLLM: the names that each needs, and which are active under given options."""

from dataclasses import dataclass

from vllm_omni_sched.compat import behaviour, modules, versions
from vllm_omni_sched.config.errors import MissingSymbolError
from vllm_omni_sched.config.options import OmniSchedConfig, Toggle


@dataclass(frozen=True)
class Probe:
    """States whether this vLLM has one extension point: the vLLM name that a feature relies on."""

    name: str
    symbol: str
    feature: str
    available: bool
    reason: str


@dataclass(frozen=True)
class Status:
    """State of a feature in this engine: whether it is active, and the reason."""

    feature: str
    active: bool
    reason: str


# Feature -> [(description, module, dotted path, needed)]. If a point that is not needed is absent, this vLLM has
# nothing to repair there.
_POINTS: dict[str, list[tuple[str, str, str, bool]]] = {
    "windows": [
        ("encoder inputs of a step", modules.SCHEDULER, "Scheduler._try_schedule_encoder_inputs", True),
        ("gather, model runner V1", modules.RUNNER_V1, "GPUModelRunner._gather_mm_embeddings", True),
        ("gather, model runner V2", modules.ENCODER_RUNNER_V2, "EncoderRunner.gather_mm_embeddings", False),
    ],
    "encoder_cache": [("encoder cache manager", modules.MANAGER, "EncoderCacheManager.free_encoder_input", True)],
    "strip_frontier": [("strip of covered data", modules.OUTPUT, "strip_covered_mm_data", False)],
    "pending_range": [("pending encoder inputs", modules.SCHEDULER, "Scheduler._get_encoder_input_updates", False)],
    "kv_event_window": [("extra keys of KV events", modules.BLOCK_POOL, "generate_block_hash_extra_keys", False)],
    "session_delta": [
        ("message of a new request", modules.OUTPUT, "NewRequestData.from_request", True),
        ("message of running requests", modules.SCHEDULER, "Scheduler._make_cached_request_data", True),
        ("session update", modules.SCHEDULER, "Scheduler._update_request_as_session", True),
        ("worker start-up", modules.WORKER_BASE, "WorkerWrapperBase.init_device", True),
        ("states, model runner V1", modules.RUNNER_V1, "GPUModelRunner._update_states", True),
        ("requests, model runner V2", modules.RUNNER_V2, "GPUModelRunner.add_requests", False),
    ],
    "mrope_append": [
        ("M-RoPE positions, model runner V1", modules.RUNNER_V1, "GPUModelRunner._init_mrope_positions", True),
        ("M-RoPE positions, model runner V2", modules.ROPE_V2, "RopeState.init_prefill_positions", False),
    ],
    "release": [("session update", modules.SCHEDULER, "Scheduler._update_request_as_session", True)],
    "options": [("early check of options", modules.ARG_UTILS, "EngineArgs.create_engine_config", True)],
    "requests": [
        ("early check of requests", modules.INPUT_PROCESSOR, "InputProcessor.process_inputs", True),
        ("early check of streamed requests", modules.ASYNC_LLM, "AsyncLLM.generate", True),
        ("early check of responses", modules.RESPONSES, "OpenAIServingResponses.create_responses", False),
    ],
    "video": [
        ("registry of video loaders", modules.VIDEO, "VIDEO_LOADER_REGISTRY.register", True),
        ("vLLM's default decoder", modules.VIDEO_OPENCV, "decode_opencv", False),
    ],
    "preprocess": [
        ("preparation of a request", modules.RENDERER, "BaseRenderer._process_multimodal", True),
        ("call of the HF processor", modules.MM_PROCESSOR, "BaseMultiModalProcessor._apply_hf_processor_main", True),
        ("decoder of pictures", modules.IMAGE_IO, "ImageMediaIO.load_bytes", True),
        ("middleware of the server", modules.SERVER_APP, "init_entrypoints_middleware", False),
    ],
    "metrics": [("registry of /metrics", "vllm.v1.metrics.prometheus", "get_prometheus_registry", True)],
}
_NOT_NEEDED = {
    "strip_frontier": "this vLLM sends items unstripped",
    "pending_range": "this vLLM keeps no set of pending inputs",
    "kv_event_window": "this vLLM's KV events carry no extra keys",
    "video": "this vLLM's loaders read from captures",
}
# Points in modules that only workers or front ends load: importing those costs seconds, so only `probe_all` looks.
_WORKER_MODULES = (modules.RUNNER_V1, modules.RUNNER_V2, modules.ENCODER_RUNNER_V2, modules.ROPE_V2)
_FRONT_END_MODULES = (
    *(modules.INPUT_PROCESSOR, modules.ASYNC_LLM, modules.RESPONSES),
    *(modules.RENDERER, modules.MM_PROCESSOR, modules.IMAGE_IO, modules.SERVER_APP),
)


def probe_all(*, workers: bool = True) -> list[Probe]:
    """Probe every extension point we use; ``workers=False`` leaves out those in model runners and front ends."""
    probes = []
    for feature, points in _POINTS.items():
        for name, module, path, needed in points:
            if module in _WORKER_MODULES + _FRONT_END_MODULES and not workers:
                continue
            found = modules.has(module, path)
            reason = "found" if found else ("missing" if needed else _NOT_NEEDED.get(feature, "not in this vLLM"))
            probes.append(Probe(name, f"{module}.{path}", feature, found, reason))
    return probes


def resolve(config: OmniSchedConfig, *, workers: bool = False) -> dict[str, Status]:
    """Return the status of each feature under these options, with this vLLM.

    Raises:
        MissingSymbolError: a feature is ``on`` and cannot work here.
    """
    probes = probe_all(workers=workers)
    return {
        feature: _status(feature, getattr(config, feature), [p for p in probes if p.feature == feature])
        for feature, field in type(config).model_fields.items()
        if field.annotation is Toggle
    }


def _status(feature: str, toggle: Toggle, probes: list[Probe]) -> Status:
    if toggle is Toggle.OFF:
        return Status(feature, False, "switched off")
    missing = [p for p in probes if p.reason == "missing"]
    if missing:
        reason = f"this vLLM has no {missing[0].symbol}"
        if toggle is Toggle.ON:
            raise MissingSymbolError(
                f"option {feature!r} is 'on' but cannot work: {reason} (vLLM {versions.vllm_version()}). "
                "Set it to 'auto' or 'off'"
            )
        return Status(feature, False, reason)
    if feature in _NOT_NEEDED and probes and not any(p.available for p in probes):
        return Status(feature, False, f"nothing to do: {_NOT_NEEDED[feature]}")
    if feature == "encoder_cache" and behaviour.native_hash_refs():
        return Status(feature, True, "vLLM counts references itself; ours adds validate()")
    if feature == "windows":
        bisects = behaviour.native_windows(modules.SCHEDULER)
        return Status(feature, True, "vLLM bisects; ours for nested items" if bisects else "ours")
    return Status(feature, True, "active")
