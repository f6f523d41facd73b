"""Workers: vLLM's CPU worker with the runner of a vLLM-Omni stage, put together as vLLM-Omni does it for XPU."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker
from vllm_omni.worker.mixins import OmniWorkerMixin

from dev.omni_cpu.platform import CpuOmniPlatform
from dev.omni_cpu.runners import CpuArModelRunner, CpuGenerationModelRunner


class _CpuOmniWorker(OmniWorkerMixin, CPUWorker):
    model_runner_cls: type

    def init_device(self) -> None:
        CpuOmniPlatform.keep_to_device()
        super().init_device()  # has made vLLM's own runner, and offers no way to name another
        self.model_runner = self.model_runner_cls(self.vllm_config, self.device)


class CpuArWorker(_CpuOmniWorker):
    model_runner_cls = CpuArModelRunner


class CpuGenerationWorker(_CpuOmniWorker):
    model_runner_cls = CpuGenerationModelRunner
