"""vLLM in a process of `.venv-cuda`, on the CUDA double: its Python files are those of `.venv-latest`.

The packages of `.venv-cuda`, torch among them, go before those of `.venv-latest`. vLLM's modules are imported on its
platform for CPUs: on that for CUDA they want compiled operators and Triton as soon as they are imported. What a model
runner asks its platform here, whether memory can be pinned, is answered as for CUDA.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

VISIBLE = "CUDA_VISIBLE_DEVICES"
WITH_VLLM = Path(__file__).parents[2] / ".venv-latest"


def site_packages() -> Path:
    """Return the folder of the packages of `.venv-latest`.

    Raises:
        FileNotFoundError: there is no such environment, or no vLLM in it.
    """
    found = next(WITH_VLLM.glob("lib/python3*/site-packages/vllm"), None)
    if found is None:
        raise FileNotFoundError(
            f"{WITH_VLLM} has no vLLM, which the tests of its model runner need: "
            "`make test-cuda` builds it, as does `python3.11 dev/bootstrap.py .venv-latest`"
        )
    return found.parent


def install() -> None:
    """Let this process import vLLM and fork: imports count devices, which would touch CUDA, so there are none as yet.

    Raises:
        FileNotFoundError: there is no vLLM.
    """
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # torch reads the variable first, and need not go on
    os.environ[VISIBLE] = ""
    sys.path.append(str(site_packages()))
    import_module("dev.environment.torchvision_without_cuda")  # it acts when torchvision is imported
    platform = import_module("vllm.platforms").current_platform
    type(platform).is_pin_memory_available = classmethod(lambda cls: True)
    import_module("vllm.utils.platform_utils").is_pin_memory_available.cache_clear()
    torch_utils: Any = import_module("vllm.utils.torch_utils")
    torch_utils.PIN_MEMORY = True  # other modules copy it when they are imported


def show_devices() -> None:
    """Let this process see the devices of the double; once it uses one, it can no longer fork."""
    del os.environ[VISIBLE]
