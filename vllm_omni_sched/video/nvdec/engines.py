"""The decoding engines of this machine's GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vllm_omni_sched.video.nvdec.library import Library, NvdecError
from vllm_omni_sched.video.nvdec.limits import EXACT, FORMATS, Limits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Engine(NamedTuple):
    """One NVDEC engine; the driver distributes the sessions of a GPU over its engines in turn."""

    gpu: int
    number: int


def table(library: Library, gpus: Iterable[int]) -> dict[int, dict[str, Limits]]:
    """Return, by GPU, the limits of each codec that it decodes in 8-bit 4:2:0; empty for a GPU that does not answer."""
    found: dict[int, dict[str, Limits]] = {}
    for gpu in gpus:
        found[gpu] = {}
        for codec in EXACT:
            try:
                limits = library.limits(gpu, codec, next(iter(FORMATS)))
            except NvdecError:
                continue
            if limits.supported:
                found[gpu][codec] = limits
    return found


def engines(found: dict[int, dict[str, Limits]], at_most: int | None = None) -> list[Engine]:
    """Return the engines of all GPUs, ordered by number, so that the first few are spread over GPUs.

    Args:
        found: result of `table`.
        at_most: most engines to use of one GPU; None for all.
    """
    counts = {gpu: max((limits.engines for limits in by_codec.values()), default=0) for gpu, by_codec in found.items()}
    if at_most is not None:
        counts = {gpu: min(count, at_most) for gpu, count in counts.items()}
    ordered = ((number, gpu) for gpu, count in counts.items() for number in range(count))
    return [Engine(gpu, number) for number, gpu in sorted(ordered)]


def here(
    at_most: int | None = None, library: Callable[[], Library] = Library, gpus: Iterable[int] | None = None
) -> list[Engine]:
    """Return the engines of this machine, as `engines` orders them; empty if NVDEC cannot be used.

    This loads the driver, which allocates memory on each GPU: call it in another process to avoid that.

    Args:
        at_most: engines to use of one GPU; None for all.
        library, gpus: replacements of PyNvVideoCodec and of all GPUs that CUDA shows.
    """
    try:
        found = library()
        if gpus is None:
            import torch

            gpus = range(torch.cuda.device_count())
    except (NvdecError, ImportError):
        return []
    return engines(table(found, gpus), at_most)
