"""Make a `ModelConfig` of a multimodal model that does not exist: no folder, no hub, no inspection of model code."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PretrainedConfig
from vllm.config import ModelConfig, MultiModalConfig

MODALITIES = ("image", "audio", "video")


class WeightlessModelConfig(ModelConfig):
    """vLLM's `ModelConfig` with its defaults, made without its constructor, which would look for a model on disk."""

    uses_mrope = False  # a property upstream, read from a Hugging Face config that is empty here

    def get_hidden_size(self) -> int:
        """Return 1: an embedding is one number."""
        return 1

    @property
    def supports_multimodal_inputs(self) -> bool:
        """Return whether the model is multimodal; the scheduler asks this since vLLM 0.31, and the registry before."""
        return self.is_multimodal_model


def make_model_config(*, max_model_len: int, multimodal: bool = True, uses_mrope: bool = False) -> ModelConfig:
    """Return the config of a model of `max_model_len` tokens.

    With `multimodal=False` it is text-only, and its scheduler has no encoder budget.
    """
    config = object.__new__(WeightlessModelConfig)
    for field in dataclasses.fields(ModelConfig):
        object.__setattr__(config, field.name, _default_of(field))
    config.model = "weightless"
    config.hf_config = config.hf_text_config = PretrainedConfig()
    config.dtype = torch.float32  # an embedding is 4 bytes
    config.runner_type = "generate"
    config.max_model_len = max_model_len
    config.skip_tokenizer_init = True
    config.multimodal_config = MultiModalConfig(mm_processor_cache_gb=0) if multimodal else None
    config.__dict__["uses_mrope"] = uses_mrope
    return config


def _default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    if field.default is dataclasses.MISSING:
        return None
    if hasattr(field.default, "get_default"):  # pydantic keeps its own FieldInfo here
        return field.default.get_default(call_default_factory=True)
    return field.default


class FixedItemSizeRegistry:
    """Stands in for vLLM's registry of multimodal processors: it only states the size of the largest item.

    vLLM never grants an encoder budget or an encoder cache below the size of one item, so `max_item_embeds` is the
    floor of both.
    """

    def __init__(self, max_item_embeds: int) -> None:
        limits: Mapping[str, None] = dict.fromkeys(MODALITIES)
        self._info = SimpleNamespace(
            supported_mm_limits=limits,
            allowed_mm_limits=dict.fromkeys(MODALITIES, 1 << 30),
            get_mm_max_tokens_per_item=lambda seq_len, mm_counts: dict.fromkeys(mm_counts, max_item_embeds),
            ctx=SimpleNamespace(model_config=SimpleNamespace(max_model_len=0)),
        )

    def supports_multimodal_inputs(self, model_config: ModelConfig) -> bool:
        return bool(model_config.is_multimodal_model)

    def processor_only_cache_from_config(self, vllm_config: Any) -> None:
        return None

    def create_processor(self, model_config: ModelConfig, **options: Any) -> Any:
        return SimpleNamespace(info=self._info)
