"""Model runners of vLLM-Omni that stand on vLLM's CPU runner in place of its GPU runner.

In the order of their bases vLLM's CPU runner comes after vLLM-Omni's and before vLLM's GPU runner, so each `super()` of
vLLM-Omni reaches the CPU version. Overridden is only what vLLM-Omni itself ties to CUDA.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_model_runner import CPUModelRunner, _torch_cuda_wrapper
from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner
from vllm_omni.worker.gpu_generation_model_runner import GPUGenerationModelRunner


class _OnCpu:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with _torch_cuda_wrapper():  # vLLM-Omni makes CUDA events, too
            super().__init__(*args, **kwargs)
        self._postprocess_tensors()  # vLLM-Omni has made buffers after vLLM's CPU runner joined host and device sides


class CpuArModelRunner(_OnCpu, GPUARModelRunner, CPUModelRunner):
    pass


class CpuGenerationModelRunner(_OnCpu, GPUGenerationModelRunner, CPUModelRunner):
    pass
