"""The tiny LLaVA in kinds that an encoder lane has to be careful with.

Importing this module tells vLLM of them, in each process: workers import it as their `worker_extension_cls`.
"""

from __future__ import annotations

from typing import Any

from vllm import ModelRegistry
from vllm.distributed import get_tp_group
from vllm.forward_context import set_forward_context
from vllm.model_executor.models.llava import LlavaForConditionalGeneration


class LlavaThatSetsContext(LlavaForConditionalGeneration):
    """Encodes within a forward context of its own, as Qwen2.5-Omni and LFM2-VL do."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self._vllm_config = vllm_config

    def embed_multimodal(self, **kwargs: object) -> Any:
        with set_forward_context(None, self._vllm_config):
            return super().embed_multimodal(**kwargs)


class LlavaThatKeepsItsGroup(LlavaForConditionalGeneration):
    """Keeps the tensor-parallel group of its worker, as encoders may that build their own layers."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.group = get_tp_group()


class Registers:
    """Adds nothing to a worker."""


for _one in (LlavaThatSetsContext, LlavaThatKeepsItsGroup):
    ModelRegistry.register_model(_one.__name__, f"{__name__}:{_one.__name__}")
