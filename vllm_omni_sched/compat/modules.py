"""Locations of the vLLM names that we rely on, and lookups of these names."""

from importlib import import_module
from typing import Any

SCHEDULER = "vllm.v1.core.sched.scheduler"
DIFFUSION_SCHEDULER = "vllm.v1.core.sched.diffusion_scheduler"
OUTPUT = "vllm.v1.core.sched.output"
MANAGER = "vllm.v1.core.encoder_cache_manager"
BLOCK_POOL = "vllm.v1.core.block_pool"
KV_CACHE_UTILS = "vllm.v1.core.kv_cache_utils"
WORKER_BASE = "vllm.v1.worker.worker_base"
RUNNER_V1 = "vllm.v1.worker.gpu_model_runner"
RUNNER_V2 = "vllm.v1.worker.gpu.model_runner"
ENGINE_CORE = "vllm.v1.engine.core"
ENCODER_RUNNER_V2 = "vllm.v1.worker.gpu.mm.encoder_runner"
ROPE_V2 = "vllm.v1.worker.gpu.mm.rope"
EC_CONNECTOR = "vllm.distributed.ec_transfer.ec_connector.base"
EC_CONNECTOR_V2 = "vllm.v1.worker.gpu.ec_connector"
PARALLEL_STATE = "vllm.distributed.parallel_state"
SHM_BROADCAST = "vllm.distributed.device_communicators.shm_broadcast"
MODEL_LOADER = "vllm.model_executor.model_loader"
LORA_LAYERS = "vllm.lora.layers"
ARG_UTILS = "vllm.engine.arg_utils"
INPUT_PROCESSOR = "vllm.v1.engine.input_processor"
ASYNC_LLM = "vllm.v1.engine.async_llm"
CORE_CLIENT = "vllm.v1.engine.core_client"
RESPONSES = "vllm.entrypoints.openai.responses.serving"
RENDERER = "vllm.renderers.base"
MM_PROCESSING = "vllm.multimodal.processing"
MM_PROCESSOR = "vllm.multimodal.processing.processor"
MM_PARSE = "vllm.multimodal.parse"
MEDIA_BASE = "vllm.multimodal.media.base"
IMAGE_IO = "vllm.multimodal.media.image"
SERVER_APP = "vllm.entrypoints.launchers.app"
VIDEO = "vllm.multimodal.video"
VIDEO_OPENCV = "vllm.multimodal.video_decoders.opencv"


def find(module: str, path: str) -> Any:
    """Return ``module.path``, or None if this vLLM does not have it."""
    try:
        found: Any = import_module(module)
    except ImportError:
        return None
    for part in path.split("."):
        found = getattr(found, part, None)
    return found


def has(module: str, path: str) -> bool:
    return find(module, path) is not None
