"""Arguments that the benchmarks have in common."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path


def add_common(
    parser: argparse.ArgumentParser,
    *,
    rounds: int | None = None,
    rounds_help: str | None = None,
    seed: int | None = 0,
    seed_help: str | None = None,
    python: bool = False,
    name: bool = False,
    timed: bool = True,
) -> None:
    """Add ``--out``, and those arguments that mean the same in several benchmarks and are asked for.

    Args:
        rounds: default of ``--rounds``; None: there is none.
        seed: default of ``--seed``; None: there is none.
        python: whether there is ``--python``.
        name: whether there is ``--name``.
        timed: whether a busy machine would change the results; see `benchmarks.harness.load`.
    """
    if rounds is not None:
        parser.add_argument("--rounds", type=at_least_one, default=rounds, help=rounds_help)
    if python:
        parser.add_argument("--python", default=sys.executable, help="interpreter whose vLLM is measured")
    if name:
        parser.add_argument("--name", default="", help="ends the name of the result file")
    if seed is not None:
        parser.add_argument("--seed", type=int, default=seed, help=seed_help)
    if timed:
        parser.add_argument("--despite-load", action="store_true", help="do not wait for an idle machine")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of the result file")


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
