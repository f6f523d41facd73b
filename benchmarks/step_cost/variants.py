"""What is compared: stock vLLM, vLLM with our patches, and our scheduler, each on some version's sources."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.child import Child

KINDS = ("stock", "patched", "ours")
DEFAULT = {
    "stock": ("0.22.1", "0.28.0", "0.30.0", "0.32.0", "0.33.0"),
    "patched": ("0.22.1", "0.32.0", "0.33.0"),
    "ours": ("0.22.1", "0.30.0", "0.32.0", "0.33.0"),
}


@dataclass(frozen=True)
class Variant:
    version: str
    kind: str  # one of KINDS

    def __str__(self) -> str:
        return f"{self.kind}:{self.version}"


def choose(versions: Sequence[str] | None, kinds: Sequence[str]) -> list[Variant]:
    """The default pairs of `kinds`; with `versions`, every kind of theirs that can be had. Older and stock come first.

    Raises ValueError on an unknown kind.
    """
    if unknown := set(kinds) - set(KINDS):
        raise ValueError(f"unknown kind {min(unknown)!r}; there are {', '.join(KINDS)}")
    chosen = [
        Variant(version, kind)
        for kind in kinds
        for version in (DEFAULT[kind] if versions is None else versions)
        if kind != "patched" or version in DEFAULT["patched"]
    ]
    return sorted(chosen, key=_rank)


def _rank(variant: Variant) -> tuple[list[int], int]:
    return [int(part) for part in variant.version.split(".")], KINDS.index(variant.kind)


class Trees:
    """Where the sources of a version are: given by hand, or fetched by pip. The installed vLLM needs none."""

    def __init__(self, given: Mapping[str, Path], python: str):
        self.given, self.python = given, python
        self.installed = importlib.metadata.version("vllm").partition("+")[0]

    def of(self, variant: Variant) -> Path | None:
        """The tree to put on PYTHONPATH; None for the installed vLLM."""
        if variant.kind == "patched":
            from patches.sources import patched_source

            return patched_source(variant.version)
        if variant.version in self.given:
            return self.given[variant.version]
        if variant.version == self.installed:
            return None
        from patches.sources import fetch_source

        return fetch_source(variant.version)

    def start(self, variant: Variant, *, sync: bool = False, runner_v2: bool = False) -> Child:
        tree = self.of(variant)
        words = ["--ours"] * (variant.kind == "ours") + ["--tree"] * (tree is not None) + ["--sync"] * sync
        words += ["--runner-v2"] * runner_v2
        return Child(
            "benchmarks.step_cost.worker",
            words,
            python=self.python,
            path=[tree] if tree else [],
            # Plugins attach to the workers; here there is only a scheduler, and stock must stay stock.
            environment={"VLLM_PLUGINS": "", "VLLM_LOGGING_LEVEL": "ERROR"},
        )
