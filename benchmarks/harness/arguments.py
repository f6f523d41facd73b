"""Arguments that the benchmarks have in common."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable


def at_least_one(text: str) -> int:
    """Parse an argument that counts something, as ``type=`` of argparse.

    Raises:
        ValueError: it is no number.
        argparse.ArgumentTypeError: it is below 1.
    """
    return _at_least(1, text)


def at_least_two(text: str) -> int:
    """Parse an argument that counts what is compared with each other, as ``type=`` of argparse.

    Raises:
        ValueError: it is no number.
        argparse.ArgumentTypeError: it is below 2.
    """
    return _at_least(2, text)


def some_of(known: Iterable[str], what: str, between: str = ",") -> Callable[[str], list[str]]:
    """Return a parser of a list of known names, as ``type=`` of argparse; it refuses an unknown one."""
    known = list(known)

    def parse(text: str) -> list[str]:
        found = [part.strip() for part in text.split(between) if part.strip()]
        for one in found:
            if one not in known:
                raise argparse.ArgumentTypeError(f"unknown {what} {one!r}; there are {', '.join(known)}")
        return found

    return parse


def _at_least(least: int, text: str) -> int:
    if (number := int(text)) < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, got {number}")
    return number
