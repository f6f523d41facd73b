"""Placement of a message in the best tier, by a view of the content of all tiers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm_omni_sched.clock import Clock
from vllm_omni_sched.config.errors import (
    ConnectorError,
    MessageTooLargeError,
    NoRoomError,
    ReceiverBehindError,
    TransportClosedError,
)
from vllm_omni_sched.connectors.framing import Message
from vllm_omni_sched.connectors.modality import Modality
from vllm_omni_sched.connectors.tiers.carry import Costs
from vllm_omni_sched.connectors.tiers.keeper import Keeper, Waits
from vllm_omni_sched.connectors.tiers.ledger import Item, Ledger, Owner
from vllm_omni_sched.connectors.tiers.options import TierRules
from vllm_omni_sched.connectors.tiers.policy import (
    ItemState,
    Link,
    Move,
    Placement,
    Pool,
    TierState,
    place,
    plan,
)
from vllm_omni_sched.connectors.transport import Transport
from vllm_omni_sched.logs import get_logger

logger = get_logger(__name__)


def next_use_seconds(expected: float, waited: float) -> float:
    """Return how long a message is expected to wait still; an overdue one, as long again as it is overdue."""
    return abs(expected - waited)


class View:
    """View of all tiers: makes snapshots of the records, and asks the policy.

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
        expected = self._waits.expected(message.edge)
        recompute = self._rules.recompute_seconds.get(str(message.edge))
        return place(ItemState(0, 0, message.nbytes, expected, pool, recompute), self._tiers(), self._rules)

    def moves(self) -> list[tuple[Item, Move]]:
        """Return the moves that should be made now, in order."""
        items = {item.id: item for item in self._ledger.all() if item.owner == Owner.NOBODY}
        states = [self._state(item) for item in items.values()]
        return [(items[move.id], move) for move in plan(states, self._tiers(), self._rules)]

    def is_worth_a_plan(self) -> bool:
        """Return whether messages may have to move; a cheap check."""
        used, high, low = self._ledger.used, self._rules.high_water, self._rules.low_water
        for number, capacity in enumerate(self._capacities[:-1]):
            if any(used[number, pool] > high * nbytes for pool, nbytes in capacity.items()):
                return True
        below = any(self._ledger.lying[number] for number in range(1, len(self._capacities)))
        return below and any(used[0, pool] < low * nbytes for pool, nbytes in self._capacities[0].items())

    def _state(self, item: Item) -> ItemState:
        left = next_use_seconds(self._waits.expected(item.edge), self._clock() - item.put_at)
        recompute = self._rules.recompute_seconds.get(str(item.edge))
        return ItemState(item.id, item.tier, item.nbytes, left, item.pool, recompute)

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


@dataclass(frozen=True)
class Tier:
    """Transport and its capacity in bytes, by pool (a `Modality`, or "" for all without a pool of their own)."""

    transport: Transport
    capacity_bytes: Mapping[str, int]

    def pools(self) -> dict[str, int]:
        """Return the bytes by pool, so that every message has a pool."""
        named = dict(self.capacity_bytes)
        return named if {kind.value for kind in Modality} <= named.keys() else {"": max(named.values()), **named}


class Placer:
    """Puts messages into tiers, tried in the policy's order, and takes back replaced messages from any tier."""

    def __init__(
        self,
        transports: Sequence[Transport],
        ledger: Ledger,
        view: View,
        keeper: Keeper,
        waits: Waits,
        costs: Sequence[Costs],
        clock: Clock,
    ) -> None:
        self._transports, self._ledger, self._view, self._keeper = transports, ledger, view, keeper
        self._waits, self._costs, self._clock = waits, costs, clock

    def put(self, message: Message, pool: str) -> tuple[int, int]:
        """Put a message, replacing another of its name; return the tier and the bytes that it holds for the message.

        Raises:
            ReceiverBehindError: a tier raised it.
            TransportClosedError: a tier is closed.
            MessageTooLargeError: no tier will ever have room.
            NoRoomError: none has room now.
        """
        refusals = []
        with self._ledger.alone(message.name):
            before = self._ledger.get(message.name)
            for attempt in self._view.placements(message, pool):
                transport, began = self._transports[attempt.tier], self._clock()
                try:
                    waits = before is not None and self._waits_in(before, attempt.tier)
                    held_bytes = transport.put(message, None)
                except (ReceiverBehindError, TransportClosedError):
                    raise
                except ConnectorError as error:
                    refusals.append((transport.name, error))
                    continue
                now = self._clock()
                if before is not None:
                    self._replace(before, attempt.tier, waits)
                self._ledger.enter(Item.of(message, pool, attempt.tier, held_bytes, now))
                with self._keeper.lock:
                    counts = self._keeper.counts
                    self._costs[attempt.tier].into.observe(message.nbytes, now - began)
                    counts.put += 1
                    counts.put_bytes += message.nbytes
                    counts.placed[f"{transport.name} {attempt.reason.value}"] += 1
                return attempt.tier, held_bytes
        never = all(isinstance(error, MessageTooLargeError) for _, error in refusals)
        said = "; ".join(f"{name}: {error}" for name, error in refusals)
        raise (MessageTooLargeError if never else NoRoomError)(
            f"no room for {message.nbytes} bytes on edge {message.edge} in any tier: {said}"
        )

    def _waits_in(self, item: Item, tier: int) -> bool:
        """Return whether a message waits in that tier, where another of its name would replace it."""
        return item.tier == tier and item.owner == Owner.NOBODY and self._transports[tier].holds(item.edge, item.key)

    def _replace(self, before: Item, tier: int, was_replaced: bool) -> None:
        """Take back a message from its tier after another of its name was put."""
        replaced = was_replaced or before.owner == Owner.MOVER
        if before.tier != tier and before.owner == Owner.NOBODY:
            try:
                replaced = self._transports[before.tier].withdraw(before.edge, before.key)
            except ConnectorError as error:
                said = "message %r of edge %s was replaced, but its old version stays in its tier: %s"
                logger.warning(said, before.key[:80], before.edge, error)
        self._keeper.gone(before, "replaced" if replaced else "consumed")
