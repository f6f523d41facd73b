"""Make the limits of a replica's work from the options of its stage."""

from vllm_omni_sched.config.stage_options.batching import BatchingOptions, BatchLimits
from vllm_omni_sched.graph.stages import StageKind
from vllm_omni_sched.resource.batch_size import BatchControl, FixedBatch
from vllm_omni_sched.resource.pid import PidBatch, PidGains
from vllm_omni_sched.resource.progressive import ProgressiveWindow
from vllm_omni_sched.resource.stage_cost import Features

PIXELS_PER_LATENT = 256  # 8 x 8 by the usual autoencoder, and 2 x 2 of those per token of the transformer


def control_of(batching: BatchingOptions, limits: BatchLimits, most: int) -> BatchControl:
    """Return the controller of a replica's batch size; `most` is what the stage supports."""
    most = min(limits.max_batch_size, most)
    if not limits.enabled:
        return FixedBatch(most)
    return PidBatch(
        limits.target_latency_ms / 1e3,
        limits.adjust_interval_ms / 1e3,
        min(limits.min_batch_size, most),
        most,
        PidGains(batching.kp, batching.ki, batching.kd),
        start=most,
        memory_high=batching.memory_high,
    )


def window_of(batching: BatchingOptions, limits: BatchLimits) -> ProgressiveWindow | None:
    """Return the window that limits a replica's long work; None if there is no limit."""
    options = batching.progressive
    if not (limits.enabled and options.enabled):
        return None
    return ProgressiveWindow(options.first_units, options.growth, options.shrink, limits.target_latency_ms / 1e3)


def units_of(kind: StageKind, features: Features) -> int:
    """Return the length of work: its prompt tokens, or for diffusion denoising steps × latents."""
    if kind is StageKind.DIFFUSION:
        return int(features.steps * (features.pixels // PIXELS_PER_LATENT))
    return int(features.prompt_tokens)
