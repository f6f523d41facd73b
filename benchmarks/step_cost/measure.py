"""The run: every variant's worker is alive at once, and they take turns."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.harness.child import Child, ChildFailed
from benchmarks.harness.stats import Summary
from benchmarks.step_cost.variants import Variant

WARM_UP = 3  # samples thrown away, of those that cost little


@dataclass
class Cell:
    """Holds samples of one variant, scenario and size: seconds, or bytes in the scenario `message_bytes`."""

    variant: Variant
    scenario: str
    size: int
    rounds: list[float] = field(default_factory=list)  # the median of each round
    samples: list[float] = field(default_factory=list)

    @property
    def summary(self) -> Summary:
        return Summary.of(self.samples)

    def as_record(self) -> dict[str, Any]:
        return {
            "scenario": self.scenario,
            "kind": self.variant.kind,
            "version": self.variant.version,
            "runner": self.variant.runner.upper(),
            "size": self.size,
            "unit": "bytes" if self.scenario == "message_bytes" else "seconds",
            **self.summary.as_dict(9),
            "rounds": [round(value, 9) for value in self.rounds],
        }


def measure(
    workers: Mapping[Variant, Child],
    plan: Sequence[tuple[str, int, int]],
    *,
    rounds: int,
    cell_seconds: float,
    seed: int,
    progress: Callable[[str, int], None],
    on_profile: Callable[[Variant, str, int, list[Any]], None] | None = None,
) -> Iterator[list[Cell]]:
    """Walk the plan, rows of (scenario, size, samples a round); yields the cells of each row when it is done.

    Within a row each round asks every worker once, in an order drawn anew, so that a noisy moment hits none alone.
    A variant whose samples have cost `cell_seconds` of CPU time leaves the row, after two rounds at the earliest.
    With `on_profile` every variant is profiled after its row, and the callback gets what the worker found.
    A worker that fails a row (its version cannot run the scenario) is reported and left out from there.
    """
    order = random.Random(seed)
    alive = dict(workers)
    for scenario, size, count in plan:
        progress(scenario, size)
        row: dict[Variant, list[Cell]] = {variant: [] for variant in alive}
        for turn in range(-1, rounds):
            for variant in order.sample(list(alive), len(alive)):
                try:
                    if turn < 0:
                        row[variant] = _prepare(alive[variant], variant, scenario, size)
                    else:
                        _sample(alive[variant], row[variant][0], turn, count, cell_seconds)
                except ChildFailed as failure:
                    progress(f"left out from here: {variant}: {str(failure).splitlines()[-1]}", size)
                    del alive[variant]
                    row.pop(variant, None)
        if on_profile is not None:
            for variant in row:
                on_profile(variant, scenario, size, alive[variant].ask(do="profile", count=count)["lines"])
        yield [cell for own in row.values() for cell in own]


def _prepare(worker: Child, variant: Variant, scenario: str, size: int) -> list[Cell]:
    """Return the cells of one variant: the scenario's, still empty, and its worker message's where it has one."""
    worker.ask(do="prepare", scenario=scenario, size=size)
    sizes = [worker.ask(do="message")["bytes"] for _ in range(3)]
    message = [] if None in sizes else [Cell(variant, "message_bytes", size, rounds=list(sizes), samples=list(sizes))]
    return [Cell(variant, scenario, size), *message]


def _sample(worker: Child, cell: Cell, turn: int, count: int, cell_seconds: float) -> None:
    if turn >= 2 and sum(cell.samples) > cell_seconds:
        return
    samples = worker.ask(do="sample", count=count + WARM_UP * (turn == 0))["samples"]
    if turn == 0:
        samples = samples[min(WARM_UP, len(samples) - 1) :]
    cell.samples += samples
    cell.rounds.append(statistics.median(samples))
