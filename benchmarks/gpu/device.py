"""Helpers of the GPU benchmarks: check that there is a GPU, and write results that name it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness.provenance import write_result


def name_of_gpu(benchmark: str) -> str:
    """Return the name of the GPU; without one that torch can use, say so on stderr and exit."""
    if not has_gpu():
        said = f"benchmarks.{benchmark} needs a CUDA device that torch can use, and there is none here"
        print(said, file=sys.stderr)
        raise SystemExit(2)
    import torch

    return str(torch.cuda.get_device_name())


def has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


def write_gpu_result(
    folder: Path, benchmark: str, gpu: str, records: Any, facts: dict[str, Any] | None = None, **extra: Any
) -> Path:
    """Write the result of a benchmark on this GPU, with its name, driver, and further ``facts`` about it."""
    import torch

    slug = "".join(c if c.isalnum() else "-" for c in gpu.lower())
    about = {"name": gpu, "driver": driver(), "cuda": torch.version.cuda, **(facts or {})}
    return write_result(folder / f"{benchmark.replace('.', '-')}-{slug}.json", benchmark, records, gpu=about, **extra)


def driver() -> str:
    try:
        words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"
