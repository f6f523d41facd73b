"""What is compared: stock vLLM, vLLM with our patches, and our scheduler, each on some version's sources."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.child import Child

KINDS = ("stock", "patched", "ours")
RUNNERS = ("v1", "v2")
V2_SINCE = (0, 33)  # from here on the scheduler keeps for model runner V2 what it does not keep for V1
DEFAULT = {
    "stock": ("0.22.1", "0.28.0", "0.30.0", "0.32.0", "0.33.0"),
    "patched": ("0.22.1", "0.32.0", "0.33.0"),
    "ours": ("0.22.1", "0.30.0", "0.32.0", "0.33.0"),
}


@dataclass(frozen=True)
class Variant:
    version: str
    kind: str  # one of KINDS
    runner: str = "v1"  # one of RUNNERS: the model runner that the scheduler works for

    def __str__(self) -> str:
        return f"{self.kind}:{self.version}" + f":{self.runner}" * (self.runner != "v1")

    @property
    def label(self) -> str:
        """The kind and the runner, in a table whose rows have the version beside it."""
        return f"{self.kind}, runner {self.runner.upper()}" if self.has_v2 else self.kind

    @property
    def has_v2(self) -> bool:
        """Whether the two runners differ for the scheduler of this version."""
        return tuple(numbers(self.version)[:2]) >= V2_SINCE

    def stock(self) -> Variant:
        return Variant(self.version, "stock", self.runner)


def choose(versions: Sequence[str] | None, kinds: Sequence[str], runners: Sequence[str] | None = None) -> list[Variant]:
    """Return the default pairs of `kinds`, or all kinds that `versions` offer, older and stock first.

    Without `runners`, V1 everywhere, and V2 too where the scheduler does more for it.

    Raises ValueError on an unknown kind.
    """
    if unknown := set(kinds) - set(KINDS):
        raise ValueError(f"unknown kind {min(unknown)!r}; there are {', '.join(KINDS)}")
    if unknown := set(runners or ()) - set(RUNNERS):
        raise ValueError(f"unknown runner {min(unknown)!r}; there are {', '.join(RUNNERS)}")
    chosen = [
        variant
        for kind in kinds
        for version in (DEFAULT[kind] if versions is None else versions)
        if kind != "patched" or version in DEFAULT["patched"]
        for runner in runners or RUNNERS
        for variant in [Variant(version, kind, runner)]
        if runners or runner == "v1" or variant.has_v2
    ]
    return sorted(chosen, key=_rank)


def numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def _rank(variant: Variant) -> tuple[list[int], str, int]:
    return numbers(variant.version), variant.runner, KINDS.index(variant.kind)


class Trees:
    """Where the sources of a version are: given by hand, or fetched by pip. The installed vLLM needs none."""

    def __init__(self, given: Mapping[str, Path], python: str):
        self.given, self.python = given, python
        self.installed = importlib.metadata.version("vllm").partition("+")[0]

    def of(self, variant: Variant) -> Path | None:
        """Return the tree to put on PYTHONPATH, or None for the installed vLLM."""
        if variant.kind == "patched":
            from patches.sources import patched_source

            return patched_source(variant.version)
        if variant.version in self.given:
            return self.given[variant.version]
        if variant.version == self.installed:
            return None
        from patches.sources import fetch_source

        return fetch_source(variant.version)

    def start(self, variant: Variant, *, sync: bool = False) -> Child:
        tree = self.of(variant)
        words = ["--ours"] * (variant.kind == "ours") + ["--tree"] * (tree is not None) + ["--sync"] * sync
        words += ["--runner-v2"] * (variant.runner == "v2")
        return Child(
            "benchmarks.step_cost.worker",
            words,
            python=self.python,
            path=[tree] if tree else [],
            # Plugins attach to the workers; here there is only a scheduler, and stock must stay stock.
            environment={"VLLM_PLUGINS": "", "VLLM_LOGGING_LEVEL": "ERROR"},
        )
