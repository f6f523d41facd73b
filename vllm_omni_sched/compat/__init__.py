"""The one place that knows vLLM's versions: what is supported, what is found, what we override.

Features are probed, not looked up by version: a name is there or it is not.
"""

from vllm_omni_sched.compat.behaviour import (
    admission_limit,
    ec_connectors_have_stats,
    ec_connectors_hold_back,
    encoder_runner_of,
    is_runner_v1,
    is_runner_v2,
    native_hash_refs,
    native_request_ids,
    native_windows,
    runner_v2_runs_ec_connectors,
    strip_feature,
    waiting_queues,
    workers_take_deltas,
)
from vllm_omni_sched.compat.features import Probe, Status, probe_all, resolve
from vllm_omni_sched.compat.modules import (
    ARG_UTILS,
    ASYNC_LLM,
    BLOCK_POOL,
    ENCODER_RUNNER_V2,
    INPUT_PROCESSOR,
    KV_CACHE_UTILS,
    OUTPUT,
    RESPONSES,
    RUNNER_V1,
    SCHEDULER,
    VIDEO,
    VIDEO_OPENCV,
    WORKER_BASE,
    find,
)
from vllm_omni_sched.compat.versions import SUPPORTED_VERSIONS, check_version, is_supported, vllm_version
from vllm_omni_sched.inventory import INVENTORY

__all__ = [
    "ARG_UTILS",
    "ASYNC_LLM",
    "BLOCK_POOL",
    "ENCODER_RUNNER_V2",
    "INPUT_PROCESSOR",
    "INVENTORY",
    "KV_CACHE_UTILS",
    "OUTPUT",
    "Probe",
    "RESPONSES",
    "RUNNER_V1",
    "SCHEDULER",
    "SUPPORTED_VERSIONS",
    "Status",
    "VIDEO",
    "VIDEO_OPENCV",
    "WORKER_BASE",
    "admission_limit",
    "check_version",
    "ec_connectors_have_stats",
    "ec_connectors_hold_back",
    "encoder_runner_of",
    "find",
    "is_runner_v1",
    "is_runner_v2",
    "is_supported",
    "native_hash_refs",
    "native_request_ids",
    "native_windows",
    "probe_all",
    "resolve",
    "runner_v2_runs_ec_connectors",
    "strip_feature",
    "vllm_version",
    "waiting_queues",
    "workers_take_deltas",
]
