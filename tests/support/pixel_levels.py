"""Compare pixel values from two resizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

MEAN, BEYOND_ONE, BEYOND_ONE_AT_EDGES = 0.25, 0.001, 0.01
"""Tolerance between torchvision's resize in integers, on a CPU, and in floats, on a GPU; see `docs/video.md`."""


class Levels(NamedTuple):
    """Differences in levels of a sample before it is normalised, of which there are 255."""

    mean: float
    beyond_one: float
    """Share of the samples that differ by more than a level."""

    def within_tolerance(self, full_of_edges: bool = False) -> bool:
        """Return whether these are as documented, for pictures that sharp edges cross here and there, or everywhere."""
        return self.mean < MEAN and self.beyond_one < (BEYOND_ONE_AT_EDGES if full_of_edges else BEYOND_ONE)


def deviation_of(processor: Any) -> list[float]:
    """Return by what a video processor divides samples of 0 to 1; those of one that normalises nothing are bytes."""
    return list(processor.image_std) if processor.do_normalize else [1 / 255]


def compare(found: Any, expected: Any, deviation: Sequence[float]) -> Levels:
    """Compare the pixel values that a video processor has made, tensors of the host."""
    levels = (found.float() - expected.float()).abs() * 255 * min(deviation)
    return Levels(float(levels.mean()), float((levels > 1.01).float().mean()))
