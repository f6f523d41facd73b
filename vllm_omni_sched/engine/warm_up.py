"""The encoder's first item is slow: memory to be had, kernels to be chosen. So the first one is a dummy."""

from collections.abc import Iterator
from typing import Any

from vllm_omni_sched.lanes import Job

WARM_UP = Job("warm-up of the lane", None)
"""To be given first to a lane that is a process: it encodes while vLLM is still starting; nothing comes of it."""


def dummy_batches(runner: Any) -> Iterator[dict[str, Any]]:
    """vLLM's own dummy item of each modality, the largest there is, as arguments of ``embed_multimodal``.

    Nothing, for a runner that has no such items.
    """
    budget = getattr(runner, "mm_budget", None)
    make = getattr(runner, "_get_mm_dummy_batch", None)
    for modality in getattr(budget, "mm_max_items_per_batch", ()) if make is not None else ():
        yield make(modality, 1)
