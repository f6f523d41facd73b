"""The health report of tiers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from vllm_omni_sched.clock import Clock
from vllm_omni_sched.connectors.base import Health, Path, Status
from vllm_omni_sched.connectors.lately import Losses
from vllm_omni_sched.connectors.tiers.books import Books
from vllm_omni_sched.connectors.tiers.carry import Carrier
from vllm_omni_sched.connectors.tiers.keeper import Keeper

LOST = ("refused", "expired", "moves_failed")
"""Counts that `health` reports as losses."""


class Reporter:
    """Combines the health of all tiers, and remembers recent losses."""

    def __init__(self, paths: Sequence[Path], books: Books, keeper: Keeper, carrier: Carrier, clock: Clock) -> None:
        self._paths, self._books, self._keeper, self._carrier = paths, books, keeper, carrier
        self._losses = Losses(LOST, clock)

    def health(self, closed: str, refusal: tuple[str, int] | None, failures: int) -> Health:
        """State of all of it.

        Args:
            closed: by what; "" while it is open.
            refusal: why the last put failed, and `Books.progress` then.
            failures: of the thread that moves messages.
        """
        found = {path.name: path.health() for path in self._paths}
        facts = self._facts(failures)
        facts |= {name: {"status": one.status.value, "reason": one.reason, **one.facts} for name, one in found.items()}
        if closed:
            return Health(Status.CLOSED, f"it was closed {closed}", facts)
        if refusal is not None and refusal[1] == self._books.progress:
            return Health(Status.SICK, refusal[0], facts)
        if all(one.status is Status.SICK for one in found.values()):
            return Health(Status.SICK, "; ".join(f"{name}: {one.reason}" for name, one in found.items()), facts)
        lately = self._losses.lately(facts)
        lately += [f"{name}: {one.reason}" for name, one in found.items() if one.status is not Status.HEALTHY]
        return Health(Status.DEGRADED if lately else Status.HEALTHY, "; ".join(lately), facts)

    def _facts(self, failures: int) -> dict[str, Any]:
        names = [path.name for path in self._paths]
        with self._keeper.lock:
            counts = self._keeper.counts.facts()
        moves = self._carrier.counts.facts()
        moves["moves_failed"] += failures
        held = Counter[str]()
        for (number, _), nbytes in list(self._books.used.items()):
            held[names[number]] += nbytes
        return {
            **counts,
            **moves,
            "in_flight": len(self._books),
            "tier_messages": {name: self._books.lying[number] for number, name in enumerate(names)},
            "tier_bytes": {name: held[name] for name in names},
        }
