"""Choice of a message's tier, and of the messages to move. Pure: a snapshot in, a plan out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from vllm_omni_sched.connectors.tiers.options import TierRules


class TierReason(str, Enum):
    """Reason why a message goes to a tier."""

    FIRST = "first"  # put there, like all messages while there is room
    LONG_WAIT = "long_wait"  # put below at once: it is not expected to be needed soon
    NO_ROOM = "no_room"  # put below: the tiers above have refused it
    HIGH_WATER = "high_water"  # moved down: the tier was too full, and other messages are expected to be needed earlier
    EXPECTED_SOON = "expected_soon"  # moved up: it is expected to be needed soon


class Link(NamedTuple):
    """Cost of moving into a tier, or out of it."""

    fixed_seconds: float
    bytes_per_second: float

    def seconds(self, nbytes: int) -> float:
        return self.fixed_seconds + nbytes / self.bytes_per_second


AT_ONCE = Link(0.0, float("inf"))


class Pool(NamedTuple):
    """Part of a tier with a capacity of its own."""

    capacity_bytes: int
    used_bytes: int


@dataclass(frozen=True)
class TierState:
    """State of a tier: pools by name ("" for all without one of their own), costs ``into`` and ``out``."""

    pools: Mapping[str, Pool]
    into: Link = AT_ONCE
    out: Link = AT_ONCE

    def pool_of(self, name: str) -> str:
        """Return the pool of this tier for messages of the pool ``name`` in other tiers."""
        return name if name in self.pools else ""


@dataclass(frozen=True)
class ItemState:
    """Message that waits, or is to be put (``tier`` is not used then).

    ``next_use_seconds``: time until it is expected to be needed.
    ``recompute_seconds``: time to compute it again; None if that is impossible.
    """

    id: int
    tier: int
    nbytes: int
    next_use_seconds: float
    pool: str = ""
    recompute_seconds: float | None = None


class Placement(NamedTuple):
    """Tier to try, and the reason."""

    tier: int
    reason: TierReason


class Move(NamedTuple):
    """Message to move, its target and the reason."""

    id: int
    target: int
    reason: TierReason


def place(item: ItemState, tiers: Sequence[TierState], rules: TierRules) -> tuple[Placement, ...]:
    """Return the tiers in the order in which to try them for a message that is put.

    1. The first one, and when it refuses, those below that pay.
    2. A message that is expected to wait long goes below at once, if the first one would be above its low mark with it.
    3. A tier pays for a message when going there and back takes less time than computing it again. One that cannot be
       computed again is worth any time.
    """
    below = [number for number in range(1, len(tiers)) if _pays(item, tiers[number])]
    first = tiers[0]
    pool = first.pools[first.pool_of(item.pool)]
    filling = pool.used_bytes + item.nbytes > rules.low_water * pool.capacity_bytes
    if item.next_use_seconds > rules.long_wait_seconds and item.nbytes >= rules.min_bytes and filling:
        return (*(Placement(n, TierReason.LONG_WAIT) for n in below), Placement(0, TierReason.FIRST))
    return (Placement(0, TierReason.FIRST), *(Placement(n, TierReason.NO_ROOM) for n in below))


def plan(items: Sequence[ItemState], tiers: Sequence[TierState], rules: TierRules) -> tuple[Move, ...]:
    """Return the moves to make, in order.

    1. A pool above its high mark has messages moved down until it is at its low mark: first those that save most room
       for the longest time, bytes x seconds until their next use.
    2. They go to the next tier below that pays (see `place`) and stays below its high mark. Without one they stay.
    3. Messages that are expected to be needed soon move up to the highest tier that stays below its low mark, the
       soonest first.
    4. Messages below ``min_bytes`` do not move down; nothing moves twice in a plan, and nothing is ever dropped.
    """
    room = _Room(tiers, rules)
    moves: list[Move] = []
    for number, tier in enumerate(tiers[:-1]):
        for pool in tier.pools:
            if not room.is_high(number, pool):
                continue
            lying = [i for i in items if i.tier == number and tier.pool_of(i.pool) == pool]
            lying.sort(key=lambda i: (-i.nbytes * i.next_use_seconds, i.id))
            for item in lying:
                if room.is_low(number, pool):
                    break
                target = next((n for n in range(number + 1, len(tiers)) if room.pays_below(item, n)), None)
                if target is not None and item.nbytes >= rules.min_bytes:
                    room.move(item, target)
                    moves.append(Move(item.id, target, TierReason.HIGH_WATER))
    moved = {move.id for move in moves}
    for item in sorted(items, key=lambda i: (i.next_use_seconds, i.id)):
        if not item.tier or item.id in moved:
            continue
        for target in range(item.tier):
            soon = item.next_use_seconds <= rules.soon_seconds + move_seconds(item, tiers, target)
            if soon and room.is_low(target, item.pool, item.nbytes):
                room.move(item, target)
                moves.append(Move(item.id, target, TierReason.EXPECTED_SOON))
                break
    return tuple(moves)


def move_seconds(item: ItemState, tiers: Sequence[TierState], target: int) -> float:
    """Return the seconds that moving a message to a tier takes."""
    return tiers[item.tier].out.seconds(item.nbytes) + tiers[target].into.seconds(item.nbytes)


def _pays(item: ItemState, tier: TierState) -> bool:
    there_and_back = tier.into.seconds(item.nbytes) + tier.out.seconds(item.nbytes)
    return item.recompute_seconds is None or there_and_back < item.recompute_seconds


class _Room:
    """Fill of all tiers while a plan is made."""

    def __init__(self, tiers: Sequence[TierState], rules: TierRules) -> None:
        self._tiers, self._rules = tiers, rules
        self._used = {(n, name): pool.used_bytes for n, t in enumerate(tiers) for name, pool in t.pools.items()}

    def is_high(self, tier: int, pool: str) -> bool:
        return not self._fits(tier, pool, 0, self._rules.high_water)

    def is_low(self, tier: int, pool: str, more: int = 0) -> bool:
        return self._fits(tier, pool, more, self._rules.low_water)

    def pays_below(self, item: ItemState, tier: int) -> bool:
        return self._fits(tier, item.pool, item.nbytes, self._rules.high_water) and _pays(item, self._tiers[tier])

    def move(self, item: ItemState, target: int) -> None:
        self._used[item.tier, self._tiers[item.tier].pool_of(item.pool)] -= item.nbytes
        self._used[target, self._tiers[target].pool_of(item.pool)] += item.nbytes

    def _fits(self, tier: int, pool: str, more: int, mark: float) -> bool:
        name = self._tiers[tier].pool_of(pool)
        return self._used[tier, name] + more <= mark * self._tiers[tier].pools[name].capacity_bytes
