"""Set the fractions of a device's peaks that work reaches, and the fixed costs of a step, each with its source."""

import math
from dataclasses import dataclass, fields

from vllm_omni_sched.errors import ConfigError
from vllm_omni_sched.sim.costs.base import Source, SourceKind


@dataclass(frozen=True)
class Efficiency:
    """Fractions of peaks, in (0, 1], and fixed costs.

    ``compute``, ``bandwidth``: fractions that the LLM reaches. ``encoder_compute``: fraction that a tower reaches.
    ``saturating_share``: the fraction of the streaming multiprocessors that suffices for the full bandwidth.
    ``lane_share``: the largest fraction of the multiprocessors that a lane gets while steps run beside it.
    ``step_seconds``, ``encode_seconds``: launches and scheduling, for each step and each batch of encodes.
    ``all_reduce_seconds``: to begin one; each layer has two under tensor parallelism.
    ``memory``: the fraction of the device's memory that the engine takes (``gpu_memory_utilization``).
    ``activation_bytes``: of that, on each device, for everything but weights and KV.
    ``request_seconds``, ``text_token_seconds``: of the front end. ``answer_seconds``: until the client has a token.

    Raises:
        ConfigError: a number is out of its range; the message names it.
    """

    compute: float = 0.6
    bandwidth: float = 0.8
    encoder_compute: float = 0.4
    saturating_share: float = 30 / 108
    lane_share: float = 0.5
    step_seconds: float = 1.5e-3
    encode_seconds: float = 3e-3
    all_reduce_seconds: float = 7e-6
    memory: float = 0.9
    activation_bytes: float = 3e9
    request_seconds: float = 1e-3
    text_token_seconds: float = 2e-6
    answer_seconds: float = 1e-3

    def __post_init__(self) -> None:
        for name in ("compute", "bandwidth", "encoder_compute", "saturating_share", "lane_share", "memory"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"efficiency {name!r} must be above 0 and at most 1, got {getattr(self, name)}")
        for one in fields(self):
            if not 0 <= getattr(self, one.name) < math.inf:
                raise ConfigError(
                    f"efficiency {one.name!r} must be finite and 0 or more, got {getattr(self, one.name)}"
                )


EFFICIENCY_SOURCES = {
    "compute": Source(
        SourceKind.PUBLISHED,
        "Bullet (ASPLOS 2026), figure 5a: Llama-3.1-8B on an A100 in chunks of 1,024 tokens gets 71 to 61 %",
    ),
    "bandwidth": Source(
        SourceKind.PUBLISHED, "gpt-fast, README: an A100 80 GB of 2,039 GB/s peaks at about 1,700 GB/s in practice"
    ),
    "encoder_compute": Source(
        SourceKind.ASSUMED,
        "products and attention are 46 % of the kernel time of a Pixtral tower (vLLM pull request 57168), "
        "and get 0.8 of the peak at best",
    ),
    "saturating_share": Source(
        SourceKind.PUBLISHED,
        "Bullet (ASPLOS 2026), section 3.2.2 and figure 8: 30 of the 108 multiprocessors of an A100 saturate its "
        "memory; taken for other devices too",
    ),
    "lane_share": Source(
        SourceKind.ASSUMED,
        "two streams that could each fill the device have half of it each; that the lane's has the lower priority is "
        "not counted",
    ),
    "step_seconds": Source(
        SourceKind.PUBLISHED,
        "gpt-fast, README: Llama-2-7B takes 9.5 ms for a token on an A100; without the reading of the weights",
    ),
    "encode_seconds": Source(SourceKind.ASSUMED, "about 400 kernel launches of 7 us, and the copy of the pixels"),
    "all_reduce_seconds": Source(
        SourceKind.PUBLISHED, "fitted to gpt-fast's tokens per second of Llama-2-7B on 2, 4 and 8 A100 with NVLink"
    ),
    "memory": Source(SourceKind.PUBLISHED, "vLLM's default of --gpu-memory-utilization"),
    "activation_bytes": Source(SourceKind.ASSUMED, "8,192 tokens of activations, the encoder cache, captured graphs"),
    "request_seconds": Source(SourceKind.ASSUMED, "HTTP, JSON, the chat template"),
    "text_token_seconds": Source(SourceKind.ASSUMED, "half a million tokens per second by a fast tokenizer"),
    "answer_seconds": Source(SourceKind.ASSUMED, "sampling back to the host, detokenizing, one event of a stream"),
}
