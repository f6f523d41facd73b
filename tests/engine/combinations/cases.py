"""The features of vLLM that encode-ahead is combined with: an engine for each, and the requests that it gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

FOLDER = "{folder}"
"""Stands for a folder of the engine's own in the arguments of a case."""

ARGS = {
    "max_model_len": 1024,
    "max_num_batched_tokens": 96,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 200,
    "enable_prefix_caching": False,
    "limit_mm_per_prompt": {"image": 8},
}
AHEAD = {"encode_ahead": True, "itl_target_ms": 0.01}  # under such a target no encode goes unnoticed


@dataclass(frozen=True)
class Ask:
    """Describes a request; its items are numbers (see `harness/media.py`), those of `embeds` are sent as embeddings.

    `how`: more arguments of `SamplingParams`. `max_tokens` 0: a vector is asked for, not tokens.
    """

    id: str
    prompt: str
    images: Sequence[int] = ()
    embeds: Sequence[int] = ()
    audios: Sequence[int] = ()
    videos: Sequence[int] = ()
    max_tokens: int = 10
    at_step: int = 0
    lora: str | None = None
    how: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """An engine of stock and one of ours with encode-ahead, and what both are asked, `rounds` times.

    `needs`: a module without which the feature cannot be tried. `in_step`: all items are left to the step.
    """

    name: str
    asks: Sequence[Ask]
    model: str = "llava"
    args: Mapping[str, Any] = field(default_factory=dict)
    omni_sched: Mapping[str, Any] = field(default_factory=lambda: AHEAD)
    rounds: int = 1
    async_scheduling: bool = False
    long: bool = False
    needs: str | None = None
    in_step: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"args": {**ARGS, **self.args}}


def _another_connector(role: str) -> dict[str, Any]:
    return {
        "ec_transfer_config": {
            "ec_connector": "ECExampleConnector",
            "ec_role": role,
            "ec_connector_extra_config": {"shared_storage_path": FOLDER},
        }
    }


WORK = "all work and no play makes jack a dull boy; "  # repeats itself, so that a drafter is right now and then


TEXT = (Ask("text", WORK * 2, max_tokens=70), Ask("more-text", "tell me more", max_tokens=60, at_step=1))
PICTURES = (
    Ask("one", "<image> what is it", (1,), at_step=4),
    Ask("behind-text", WORK * 3 + "<image> and <image>?", (2, 3), at_step=5),
    Ask("between", f"<image>{WORK * 2}<image>{WORK}<image>", (4, 5, 6), at_step=6),
    Ask("same", "<image><image> or <image>", (4, 1, 4), at_step=12),
    Ask("at-the-end", "x" * 95 + "<image>", (7,), at_step=14),  # a drafter reads it while the chunk before it runs
    Ask("many", WORK * 2 + "<image> " * 8, tuple(range(10, 18)), at_step=16),
)
BASE = (*TEXT, *PICTURES)


def _with_lora(ask: Ask) -> Ask:
    return Ask(**{**vars(ask), "lora": "lora"})


def _structured(ask: Ask, **how: Any) -> Ask:
    return Ask(**{**vars(ask), "how": {"structured_outputs": how}})


def _vector(ask: Ask) -> Ask:
    return Ask(**{**vars(ask), "max_tokens": 0})


CHAT = {"profile": "chat", "itl_target_ms": 0.01, "prefill_control": "off"}
BEGINNING = f"<image>{WORK}<image>"
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
CASES = (
    Case(
        "eagle",
        BASE,
        args={"speculative_config": {"method": "eagle", "model": "eagle", "num_speculative_tokens": 1}},
    ),
    # its encoder needs a process of its own, which a lane on a CPU is
    Case(
        "profile, encoder that sets the forward context",
        BASE,
        args={"hf_overrides": {"architectures": ["LlavaThatSetsContext"]}},
        omni_sched=CHAT,
    ),
    # all of them with the adapter: on CPUs vLLM also adapts the tokens of requests without one in a step that has any
    Case("lora", tuple(map(_with_lora, BASE)), args={"enable_lora": True, "max_lora_rank": 8}),
    Case(
        "structured-outputs, prefix caching, whole items",
        (
            *TEXT,
            _structured(PICTURES[0], regex="[0-9a-f]+"),
            _structured(PICTURES[2], choice=["a dog", "a cat", "neither of them"]),
            *PICTURES[3:],
            *(Ask(f"again-{step}", f"{BEGINNING} is it {step}?", (4, 5), at_step=step) for step in (8, 24, 30)),
        ),
        args={"enable_prefix_caching": True, "disable_chunked_mm_input": True, "max_num_batched_tokens": 128},
    ),
    Case(
        "client-embeddings",
        (
            *BASE,
            Ask("given", "<image> what is it", embeds=(1,), at_step=7),
            Ask("given-behind-text", f"{WORK * 2}<image><image>", embeds=(2, 3), at_step=18),
        ),
        args={"enable_mm_embeds": True},
    ),
    Case(
        "another-connector",
        BASE,
        args=_another_connector("ec_both"),
        rounds=2,
    ),
    Case(
        "another-connector, consumer",
        BASE,
        args=_another_connector("ec_consumer"),
        rounds=2,
        long=True,
    ),
    Case(
        "ngram",
        BASE,
        args={"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}},
        long=True,
    ),
    Case(
        "suffix decoding",
        BASE,
        args={"speculative_config": {"method": "suffix", "num_speculative_tokens": 4}},
        long=True,
        needs="arctic_inference",
    ),
    Case(
        "processor cache in shared memory",
        BASE,
        args={
            "mm_processor_cache_type": "shm",
            "mm_processor_cache_gb": 0.0625,
            "mm_shm_cache_max_object_size_mb": 8,
            "distributed_executor_backend": "mp",
        },
        long=True,
        in_step=True,
    ),
    Case(
        "eagle, async scheduling, prefix caching",
        BASE,
        args={
            "speculative_config": {"method": "eagle", "model": "eagle", "num_speculative_tokens": 1},
            "enable_prefix_caching": True,
        },
        async_scheduling=True,
        long=True,
    ),
    Case(
        "pooling",
        tuple(map(_vector, BASE)),
        args={"runner": "pooling", "convert": "embed", "max_num_batched_tokens": 256},
        long=True,
    ),
    Case(
        "audio",
        (
            *TEXT,
            Ask("one", "<|audio_bos|><|AUDIO|><|audio_eos|> what is it", audios=(1,), at_step=4),
            Ask("two", f"<|AUDIO|> {WORK}<|AUDIO|>", audios=(2, 3), at_step=5),
            Ask("same", "<|AUDIO|> and <|AUDIO|>", audios=(2, 1), at_step=9),
        ),
        model="qwen2-audio",
        args={"limit_mm_per_prompt": {"audio": 2}, "max_num_batched_tokens": 800},
        long=True,
    ),
    Case(
        "video",
        (
            *TEXT,
            Ask("one", f"{VIDEO} what is it", videos=(1,), at_step=4),
            Ask("two", f"<|video_pad|> {WORK}<|video_pad|>", videos=(2, 3), at_step=5),
            Ask("with-image", "<|image_pad|> and <|video_pad|>", (1,), videos=(2,), at_step=9),
        ),
        model="qwen2-vl",
        args={"limit_mm_per_prompt": {"video": 2, "image": 2}},
        long=True,
    ),
    Case(
        "pruned video",
        (
            *TEXT,
            Ask("one", f"{VIDEO} what is it", videos=(1,), at_step=4),
            Ask("two", f"{VIDEO} {WORK}{VIDEO}", videos=(2, 3), at_step=5),
            Ask("with-image", f"<|vision_start|><|image_pad|><|vision_end|> and {VIDEO}", (1,), videos=(2,), at_step=9),
        ),
        model="qwen2.5-vl",
        args={"limit_mm_per_prompt": {"video": 2, "image": 2}, "video_pruning_rate": 0.5},
        long=True,
    ),
)
