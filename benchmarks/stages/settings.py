"""What the tasks are told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.stages.pair import Pair


@dataclass(frozen=True)
class Settings:
    """``rounds`` are those that are measured. ``pin``: replicas get a core each where that matters."""

    model: Path
    rounds: int
    seed: int
    pin: bool = False

    def rng(self, task: str) -> Random:
        """Return the generator of a task; each has its own, so that it draws the same whichever others run."""
        return Random(f"{self.seed} {task}")

    def pair(self, seqs: int, options: dict[str, object] | None = None, *, pin: bool = False, **spec: Any) -> Pair:
        """Return both pipelines. ``pin``: their replicas get a core each, if these settings say so"""
        return Pair(self.model, seqs=seqs, options=options, pin=pin and self.pin, **spec)
