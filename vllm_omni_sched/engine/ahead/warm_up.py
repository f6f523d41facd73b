"""Warm-up of the encoder by a dummy item, because its first encode is slow: it allocates memory and chooses kernels."""

from collections.abc import Iterator
from typing import Any

from vllm_omni_sched.lanes import Job

WARM_UP = Job("warm-up of the lane", None)
"""The first job of a process lane: it encodes dummies while vLLM is still starting, and has no result."""


def dummy_batches(runner: Any) -> Iterator[dict[str, Any]]:
    """Yield vLLM's own dummy item of each modality, of the largest size, as arguments of ``embed_multimodal``.

    Yields nothing for a runner without dummy items.
    """
    budget = getattr(runner, "mm_budget", None)
    make = getattr(runner, "_get_mm_dummy_batch", None)
    if make is None:
        return
    for modality in getattr(budget, "mm_max_items_per_batch", ()):
        yield make(modality, 1)
