"""Snapshots of the tiers for the policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vllm_omni_sched.clock import Clock
from vllm_omni_sched.connectors.framing import Message
from vllm_omni_sched.connectors.tiers.carry import Costs
from vllm_omni_sched.connectors.tiers.expect import Waits, next_use_seconds
from vllm_omni_sched.connectors.tiers.ledger import Item, Ledger, Owner
from vllm_omni_sched.connectors.tiers.options import TierRules
from vllm_omni_sched.connectors.tiers.policy import (
    ItemState,
    Link,
    Move,
    Placement,
    Pool,
    TierState,
    is_in_time,
    place,
    plan,
)


class View:
    """Makes snapshots of what is known, and asks the policy.

    Args:
        capacities: bytes of each tier, by pool; "" for all that have none of their own.
    """

    def __init__(
        self,
        capacities: Sequence[Mapping[str, int]],
        rules: TierRules,
        ledger: Ledger,
        costs: Sequence[Costs],
        waits: Waits,
        clock: Clock,
    ) -> None:
        self._capacities, self._rules, self._ledger = capacities, rules, ledger
        self._costs, self._waits, self._clock = costs, waits, clock

    def placements(self, message: Message, pool: str) -> tuple[Placement, ...]:
        """Return the tiers to try for a message."""
        hint = message.next_use_seconds
        expected = self._waits.expected(message.edge) if hint is None else hint
        recompute = self._rules.recompute_seconds.get(str(message.edge))
        return place(ItemState(0, 0, message.nbytes, expected, pool, recompute), self._tiers(), self._rules)

    def moves(self) -> list[tuple[Item, Move]]:
        """Return the moves that should be made now, in order."""
        items = {item.id: item for item in self._ledger.all() if item.owner == Owner.NOBODY}
        states = [self._state(item) for item in items.values()]
        return [(items[move.id], move) for move in plan(states, self._tiers(), self._rules)]

    def is_in_time(self, item: Item, move: Move) -> bool:
        """Return whether a planned move is still of use."""
        return is_in_time(self._state(item), self._tiers(), move)

    def is_worth_a_plan(self) -> bool:
        """Return whether messages may have to move; a cheap check."""
        used, high, low = self._ledger.used, self._rules.high_water, self._rules.low_water
        for number, capacity in enumerate(self._capacities[:-1]):
            if any(used[number, pool] > high * nbytes for pool, nbytes in capacity.items()):
                return True
        below = any(self._ledger.lying[number] for number in range(1, len(self._capacities)))
        return below and any(used[0, pool] < low * nbytes for pool, nbytes in self._capacities[0].items())

    def _state(self, item: Item) -> ItemState:
        expected = item.expected if item.hinted else self._waits.expected(item.edge)
        left = next_use_seconds(expected, self._clock() - item.put_at)
        recompute = self._rules.recompute_seconds.get(str(item.edge))
        return ItemState(item.id, item.tier, item.nbytes, left, item.pool, recompute, item.hinted)

    def _tiers(self) -> list[TierState]:
        states = []
        for number, (capacity, costs) in enumerate(zip(self._capacities, self._costs, strict=True)):
            pools = {name: Pool(nbytes, self._ledger.used[number, name]) for name, nbytes in capacity.items()}
            rate = self._rules.bytes_per_second
            into, out = (
                Link(cost.seconds(0) or 0.0, cost.bytes_per_second or rate) for cost in (costs.into, costs.out)
            )
            states.append(TierState(pools, into, out if number else Link(0.0, float("inf"))))
        return states
