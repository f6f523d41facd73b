"""Differences in behaviour between vLLM's versions, and the class of its objects."""

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import Any

from vllm_omni_sched.compat import modules, versions
from vllm_omni_sched.config.errors import MissingSymbolError
from vllm_omni_sched.config.options import OmniSchedConfig, Toggle


def native_windows(module: str) -> bool:
    """Return whether that module bisects its feature list itself (vllm#44212: 0.23 scheduler and V1, 0.24 V2)."""
    return modules.has(module, "get_mm_features_in_window")


def native_hash_refs() -> bool:
    """Return whether vLLM's own encoder cache manager counts references by request and hash (0.33)."""
    manager = modules.find(modules.MANAGER, "EncoderCacheManager")
    return manager is not None and hasattr(manager, "_add_cached_input_id")


def native_request_ids() -> bool:
    """Return whether vLLM's own encoder cache manager indexes a request's cached items (0.23+)."""
    manager = modules.find(modules.MANAGER, "EncoderCacheManager")
    return manager is not None and hasattr(manager(0), "request_cached_ids")


def ec_connectors_hold_back() -> bool:
    """Return whether EC connectors may keep requests waiting, and receive reports of the workers."""
    names = ("ensure_cache_available", "build_connector_worker_meta", "take_unavailable_requests")
    return all(modules.has(modules.EC_CONNECTOR, f"ECConnectorBase.{name}") for name in names)


def ec_reports_of_all_workers() -> bool:
    """Return whether the reports of all workers' EC connectors reach the scheduler, not only those of one worker."""
    return modules.has("vllm.v1.executor.abstract", "Executor.init_ec_output_aggregator")


def workers_on_one_host(vllm_config: Any) -> bool:
    """Return whether all workers of this engine are known to be on one host, started by the engine itself."""
    parallel = vllm_config.parallel_config
    return parallel.distributed_executor_backend in ("mp", "uni") and getattr(parallel, "nnodes", 1) == 1


def tensor_parallel_group() -> Any:
    """Return this worker's tensor-parallel group, a ``GroupCoordinator``."""
    return import_module(modules.PARALLEL_STATE).get_tp_group()


def replace_tensor_parallel_group(group: Any) -> None:
    """Let everything in this process use ``group`` as its tensor-parallel group from now on."""
    state: Any = import_module(modules.PARALLEL_STATE)
    state._TP = group


def ec_connectors_have_stats() -> bool:
    """Return whether vLLM collects statistics of EC connectors (0.32)."""
    return modules.has(modules.EC_CONNECTOR, "ECConnectorBase.get_ec_connector_stats")


def read_ahead_of(scheduler: Any) -> int:
    """Return how many tokens behind a chunk a drafter reads with their embeddings; 0 without such a drafter."""
    return int(getattr(scheduler, "num_prefill_lookahead", getattr(scheduler, "use_eagle", False)))


def encoder_graph_embeds(vllm_config: Any) -> int | None:
    """Return the size of the largest item for which vLLM captures a CUDA graph of the encoder.

    0: it captures none. None: it captures some, and chooses their sizes only when the model is loaded.
    """
    compilation = vllm_config.compilation_config
    on_cuda = getattr(vllm_config.device_config, "device_type", "") == "cuda"
    if not on_cuda or not getattr(compilation, "cudagraph_mm_encoder", False):
        return 0
    return max(getattr(compilation, "encoder_cudagraph_token_budgets", ()), default=None)


def copy_output_widths(measured: Any, other: Any) -> None:
    """Copy what vLLM measured into the `ECTransferConfig` of an engine that produces encodings (0.33) to another."""
    widths = getattr(measured, "mm_encoder_output_widths", None)
    if widths is not None:
        other.mm_encoder_output_widths = widths


def model_class(model_config: Any) -> type | None:
    """Return the class of which vLLM will make the model; None if vLLM finds none, which it will report itself."""
    find = modules.find(modules.MODEL_LOADER, "get_model_architecture")
    if find is None:
        return None
    try:
        found: type = find(model_config)[0]
    except Exception:  # noqa: BLE001  of whatever kind: the engine ends with it, or the worker looks at the model
        return None
    return found


def sets_forward_context(cls: type) -> str:
    """Return the name of this class, or of the base of it, whose module sets vLLM's forward context; empty if none."""
    for one in cls.__mro__:
        if hasattr(sys.modules.get(one.__module__), "set_forward_context"):
            return one.__qualname__
    return ""


def encoder_attention_in_one_buffer(vllm_config: Any) -> bool:
    """Return whether the operator has chosen FlashInfer for the attention of the encoder; vLLM never does by itself."""
    multimodal = getattr(vllm_config.model_config, "multimodal_config", None)
    return getattr(getattr(multimodal, "mm_encoder_attn_backend", None), "name", None) == "FLASHINFER"


def rust_front_end() -> bool:
    """Return whether vLLM's front end in Rust serves the requests (0.33), in which no code of plugins runs."""
    return bool(getattr(import_module("vllm.envs"), "VLLM_USE_RUST_FRONTEND", False))


def is_lora_layer(module: Any) -> bool:
    """Return whether a module of a model is one to which LoRA weights may be added."""
    layer = modules.find(modules.LORA_LAYERS, "BaseLayerWithLoRA")
    return layer is not None and isinstance(module, layer)


def admission_limit(scheduler: Any) -> str:
    """Return the attribute that bounds the number of admitted requests; 0.32 separates it from the workers' slots.

    Raises:
        MissingSymbolError: this vLLM has no such attribute.
    """
    return _attribute(scheduler, "batch_control", "max_num_active_reqs", "max_num_running_reqs")


def waiting_queues(scheduler: Any) -> tuple[str, ...]:
    """Return the attributes that hold the waiting requests in queue order; before 0.32, skipped ones are in a second
    queue.

    Raises:
        MissingSymbolError: this vLLM has no such attribute.
    """
    waiting = _attribute(scheduler, "waiting_order", "waiting")
    return (waiting, "skipped_waiting") if hasattr(scheduler, "skipped_waiting") else (waiting,)


def waiting_requests(scheduler: Any) -> Iterator[Any]:
    """Yield the waiting requests of all queues, in any version of vLLM, about in the order of admission."""
    for name in ("kv_holding_waiting", "skipped_waiting", "waiting"):
        yield from getattr(scheduler, name, ())


def is_queued(scheduler: Any, request: Any) -> bool:
    """Return whether the request is in any of the scheduler's waiting queues, in any version of vLLM."""
    names = ("waiting", "skipped_waiting", "kv_holding_waiting")
    return any(request in getattr(scheduler, name, ()) for name in names)


def hash_block_size(scheduler: Any) -> int:
    """Return the number of tokens of one block hash of a request; 0.22 does not separate it from the block size."""
    size: int = getattr(scheduler, "hash_block_size", scheduler.block_size)
    return size


def has_pending_inputs() -> bool:
    """Return whether the scheduler tells model runner V2 which encoder inputs to drop (0.33)."""
    return modules.has(modules.SCHEDULER, "Scheduler._get_encoder_input_updates")


@cache
def strands_preempted_sessions() -> bool:
    """Return whether a session that stops while preempted is lost: queued at once, and then removed (up to 0.32)."""
    stopped = modules.find(modules.SCHEDULER, "Scheduler._handle_stopped_request")
    return stopped is not None and "_enqueue_waiting_request" in stopped.__code__.co_names


@cache
def delivers_output_after_stop() -> bool:
    """Return whether tokens in flight when a turn of a session ends are taken for tokens of its next turn (0.30)."""
    stopped = modules.find(modules.SCHEDULER, "Scheduler._handle_stopped_request")
    preempt = modules.find(modules.SCHEDULER, "Scheduler._preempt_request")
    return "drop_stale_output" in preempt.__code__.co_names and "drop_stale_output" not in stopped.__code__.co_names


@cache
def keeps_encodings_for_drafts() -> bool:
    """Return whether encodings are kept until a drafter is past their items, too (0.30 to 0.32)."""
    freed = modules.find(modules.SCHEDULER, "Scheduler._free_encoder_inputs")
    return freed is not None and "spec_lookahead" in freed.__code__.co_varnames


def diffusion_schedulers() -> tuple[Any, Any]:
    """Return vLLM's synchronous and asynchronous schedulers for diffusion LLMs; None each before 0.32."""
    names = ("DiffusionScheduler", "DiffusionAsyncScheduler")
    sync, asynchronous = (modules.find(modules.DIFFUSION_SCHEDULER, name) for name in names)
    return sync, asynchronous


def is_diffusion_llm(vllm_config: Any) -> bool:
    """Return whether vLLM would choose a scheduler for diffusion LLMs if none were named."""
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
    """Return whether model runner V2 runs the life cycle of EC connectors in every step, and sends their reports."""
    return modules.has(modules.EC_CONNECTOR_V2, "ActiveECConnector.no_forward") and modules.has(
        "vllm.v1.outputs", "ModelRunnerOutput.with_ec_conn_output"
    )


def strip_feature() -> Callable[[Any, bool], Any]:
    """Return a function ``(feature, uses_mrope) -> feature`` that removes the data that no worker needs any more.

    It is vLLM's own rule if there is one (0.29+), so that vLLM decides on exceptions (shared-memory addresses, M-RoPE
    metadata); for older versions, only data that is certainly not needed is removed.
    """
    found = modules.find(modules.OUTPUT, "strip_covered_mm_data")
    strip = getattr(found, "__wrapped__", found)  # the function that `rebind` has wrapped
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


def device_name() -> str:
    """Return the name of the kind of device that vLLM computes on."""
    platform = import_module("vllm.platforms").current_platform
    try:
        return str(platform.get_device_name())
    except NotImplementedError:
        return str(platform.device_name)


def device_type() -> str:
    """Return the type of device that engines here run on, as in vLLM's configuration; "" if vLLM finds none."""
    return str(import_module("vllm.platforms").current_platform.device_type or "")


def workers_take_deltas(vllm_config: Any, config: OmniSchedConfig) -> bool:
    """Return whether all workers of this engine understand session deltas.

    Raises:
        MissingSymbolError: they do not, and the option is ``on``.
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


@cache
def rewinds_by_offset() -> bool:
    """Return whether runner V1 takes back random numbers by an offset, which generators of CPUs do not have."""
    bookkeeping = modules.find(modules.RUNNER_V1, "GPUModelRunner._bookkeeping_sync")
    return bookkeeping is not None and "set_offset" in bookkeeping.__code__.co_names


def is_runner_v2(runner: Any) -> bool:
    """Check by the module's name: not every machine can import it (it needs Triton), but one with such a runner has."""
    return any(base.__module__ == modules.RUNNER_V2 for base in type(runner).__mro__)


def encoder_runner_of(runner: Any) -> Any:
    """Return the V2 ``EncoderRunner`` of a V2 model runner; None for a model without encoder."""
    for owner in (runner, getattr(runner, "model_state", None)):
        found = getattr(owner, "encoder_runner", None)
        if found is not None:
            return found
    return None
