"""Hugging Face's video processors in `.venv-cuda`, which has no vLLM: they are those of `.venv`.

Only the packages in `PACKAGES` are found there, after all others, so that nothing else changes. torchvision's compiled
library does not load beside this torch, as it does not in `.venv`; resizing is torch's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, DistributionFinder, MetadataPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
WITH_VLLM = ROOT / ".venv"
PACKAGES = (
    "PIL",
    "anyio",
    "certifi",
    "h11",
    "httpcore",
    "httpx",
    "huggingface_hub",
    "idna",
    "regex",
    "safetensors",
    "tokenizers",
    "torchvision",
    "tqdm",
    "transformers",
)
"""Packages that transformers imports for a video processor, and `.venv-cuda` does not have."""
DISTRIBUTIONS = {{"PIL": "pillow"}.get(package, package).replace("_", "-") for package in PACKAGES}


class FromVllmEnvironment(DistributionFinder):
    """Finds `PACKAGES` in `.venv`, and what their metadata says."""

    def __init__(self, site_packages: str) -> None:
        self._path = [site_packages]

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return PathFinder.find_spec(name, self._path, target) if name in PACKAGES else None

    def find_distributions(
        self,
        context: DistributionFinder.Context = DistributionFinder.Context(),  # noqa: B008 - as its base has it
    ) -> Iterable[Distribution]:
        names = DISTRIBUTIONS if context.name is None else DISTRIBUTIONS & {context.name.lower().replace("_", "-")}
        for name in sorted(names):
            yield from MetadataPathFinder.find_distributions(DistributionFinder.Context(name=name, path=self._path))


def video_processor(name: str) -> Any:
    """Return the class of a video processor of transformers, by its name.

    Raises:
        FileNotFoundError: there is no `.venv`.
    """
    if not any(isinstance(finder, FromVllmEnvironment) for finder in sys.meta_path):
        found = next(WITH_VLLM.glob("lib/python3*/site-packages/transformers"), None)
        if found is None:
            raise FileNotFoundError(f"{WITH_VLLM} has no transformers, which these tests need: run `make venv`")
        sys.meta_path.append(FromVllmEnvironment(str(found.parent)))
        import_module("dev.environment.torchvision_without_cuda")  # it acts when torchvision is imported
    from transformers.models.auto.video_processing_auto import video_processor_class_from_name

    return video_processor_class_from_name(name)


def families() -> dict[str, str]:
    """Return the name of the video processor of each type of model that has one in this transformers."""
    video_processor("Qwen2VLVideoProcessor")
    from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING_NAMES

    return dict(VIDEO_PROCESSOR_MAPPING_NAMES)
