"""The platform: vLLM's CPU, with what vLLM-Omni asks of a platform besides.

Its devices: 0 is the machine; each further one is a single core, counted from 1.
"""

from __future__ import annotations

import os

import torch
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum

WORKERS = "dev.omni_cpu.workers"


class CpuOmniPlatform(OmniPlatform, CpuPlatform):
    _omni_enum = OmniPlatformEnum.OOT
    device_control_env_var = "OMNI_CPU_DEVICES"  # vLLM's own names nodes of memory

    @classmethod
    def get_omni_ar_worker_cls(cls) -> str:
        return f"{WORKERS}.CpuArWorker"

    @classmethod
    def get_omni_generation_worker_cls(cls) -> str:
        return f"{WORKERS}.CpuGenerationWorker"

    @classmethod
    def get_diffusion_attn_backend_cls(
        cls, selected_backend: str | None, head_size: int, allow_trtllm_default: bool = False
    ) -> str:
        return "dev.omni_cpu.attention.CpuAttentionBackend"

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def get_device_count(cls) -> int:
        """Stages take turns on a device while they start; all of them share this one."""
        return 1

    @classmethod
    def keep_to_device(cls) -> None:
        """Pin this process to the cores of its devices, unless it was given the whole machine."""
        given = [int(one) for one in os.environ.get(cls.device_control_env_var, "0").split(",")]
        if 0 not in given:
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[(device - 1) % len(cores)] for device in given})

    @classmethod
    def synchronize(cls) -> None:
        pass

    # a worker of a diffusion stage asks for these

    @classmethod
    def empty_cache(cls) -> None:
        pass

    @classmethod
    def reset_peak_memory_stats(cls) -> None:
        pass

    @classmethod
    def max_memory_reserved(cls) -> int:
        return 0

    @classmethod
    def max_memory_allocated(cls) -> int:
        return 0


def qualified_name() -> str:
    """Return the platform's class name; the entry point in `vllm_omni.platform_plugins`."""
    return f"{CpuOmniPlatform.__module__}.{CpuOmniPlatform.__qualname__}"
