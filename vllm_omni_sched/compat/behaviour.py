"""How this vLLM does what differs between versions, and which of its classes an object is of."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import Any

from vllm_omni_sched.compat import modules, versions
from vllm_omni_sched.config import OmniSchedConfig, Toggle
from vllm_omni_sched.errors import MissingSymbolError


def native_windows(module: str) -> bool:
    """Whether that module bisects its feature list itself (vllm#44212: 0.23 scheduler and V1, 0.24 V2)."""
    return modules.has(module, "get_mm_features_in_window")


def native_hash_refs() -> bool:
    """Whether vLLM's own encoder cache manager counts references by request and hash (0.33)."""
    manager = modules.find(modules.MANAGER, "EncoderCacheManager")
    return manager is not None and hasattr(manager, "_add_cached_input_id")


def native_request_ids() -> bool:
    """Whether vLLM's own encoder cache manager indexes a request's cached items (0.23+)."""
    manager = modules.find(modules.MANAGER, "EncoderCacheManager")
    return manager is not None and hasattr(manager(0), "request_cached_ids")


def ec_connectors_hold_back() -> bool:
    """Whether EC connectors may keep requests waiting, and hear of what workers have done."""
    names = ("ensure_cache_available", "build_connector_worker_meta", "take_unavailable_requests")
    return all(modules.has(modules.EC_CONNECTOR, f"ECConnectorBase.{name}") for name in names)


def ec_connectors_have_stats() -> bool:
    """Whether vLLM collects statistics of EC connectors (0.32)."""
    return modules.has(modules.EC_CONNECTOR, "ECConnectorBase.get_ec_connector_stats")


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


def is_queued(scheduler: Any, request: Any) -> bool:
    """Whether the request is in one of the scheduler's waiting queues, whatever this vLLM has."""
    names = ("waiting", "skipped_waiting", "kv_holding_waiting")
    return any(request in getattr(scheduler, name, ()) for name in names)


def hash_block_size(scheduler: Any) -> int:
    """Tokens of one block hash of a request; 0.22 does not tell it from the size of a block."""
    size: int = getattr(scheduler, "hash_block_size", scheduler.block_size)
    return size


@cache
def strands_preempted_sessions() -> bool:
    """Whether a session that stops while it is preempted is lost: queued at once, and then removed (up to 0.32)."""
    stopped = modules.find(modules.SCHEDULER, "Scheduler._handle_stopped_request")
    return stopped is not None and "_enqueue_waiting_request" in stopped.__code__.co_names


def diffusion_schedulers() -> tuple[Any, Any]:
    """vLLM's synchronous and its asynchronous scheduler for diffusion LLMs; None where it has none (before 0.32)."""
    names = ("DiffusionScheduler", "DiffusionAsyncScheduler")
    sync, asynchronous = (modules.find(modules.DIFFUSION_SCHEDULER, name) for name in names)
    return sync, asynchronous


def is_diffusion_llm(vllm_config: Any) -> bool:
    """By the rule after which vLLM takes a scheduler for diffusion LLMs when none is named."""
    return getattr(vllm_config, "diffusion_config", None) is not None


def _attribute(scheduler: Any, option: str, *names: str) -> str:
    for name in names:
        if hasattr(scheduler, name):
            return name
    vllm = versions.vllm_version()
    raise MissingSymbolError(
        f"option {option!r} cannot work: the scheduler of vLLM {vllm} has no {names[-1]}. Leave it out"
    )


def runner_v2_runs_ec_connectors() -> bool:
    """Whether model runner V2 runs the life cycle of EC connectors in every step, and sends what they report."""
    return modules.has(modules.EC_CONNECTOR_V2, "ActiveECConnector.no_forward") and modules.has(
        "vllm.v1.outputs", "ModelRunnerOutput.with_ec_conn_output"
    )


def strip_feature() -> Callable[[Any, bool], Any]:
    """``(feature, uses_mrope) -> feature`` without the data that no worker needs any more.

    vLLM's own rule where it has one (0.29+), so that exceptions (shared-memory
    addresses, M-RoPE metadata) stay its business; before that, only data that is
    certainly not needed is dropped.
    """
    found = modules.find(modules.OUTPUT, "strip_covered_mm_data")
    strip = getattr(found, "__wrapped__", found)  # what `rebind` has wrapped
    if strip is not None:
        takes_mrope = "uses_mrope" in inspect.signature(strip).parameters

        def by_vllm(feature: Any, uses_mrope: bool) -> Any:
            position = feature.mm_position
            end = position.offset + position.length
            return strip([feature], max(end, 1), **({"uses_mrope": uses_mrope} if takes_mrope else {}))[0]

        return by_vllm

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


def is_runner_v1(runner: Any) -> bool:
    cls = modules.find(modules.RUNNER_V1, "GPUModelRunner")
    return cls is not None and isinstance(runner, cls)


def is_runner_v2(runner: Any) -> bool:
    """By its module: not every machine can import it (it needs Triton), but one that has such a runner has."""
    return any(base.__module__ == modules.RUNNER_V2 for base in type(runner).__mro__)


def encoder_runner_of(runner: Any) -> Any:
    """The V2 ``EncoderRunner`` of a V2 model runner; None for a model without encoder."""
    for owner in (runner, getattr(runner, "model_state", None)):
        found = getattr(owner, "encoder_runner", None)
        if found is not None:
            return found
    return None
