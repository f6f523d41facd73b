"""Arguments that the benchmarks have in common."""

from __future__ import annotations

import argparse


def at_least_one(text: str) -> int:
    """Parse an argument that counts something, as ``type=`` of argparse.

    Raises:
        ValueError: it is no number.
        argparse.ArgumentTypeError: it is below 1.
    """
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number
