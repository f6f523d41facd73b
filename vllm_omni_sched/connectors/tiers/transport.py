"""Transport that combines several tiers."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from vllm_omni_sched.clock import Clock, monotonic_seconds, sleep_seconds
from vllm_omni_sched.config.errors import ConfigError, NoRoomError
from vllm_omni_sched.connectors.disk import DiskTransport
from vllm_omni_sched.connectors.edge import Edge, name_of
from vllm_omni_sched.connectors.framing import Arrival, Message
from vllm_omni_sched.connectors.medium import MediumTransport, Refusal
from vllm_omni_sched.connectors.modality import modality_of
from vllm_omni_sched.connectors.tiers.carry import Carrier, Costs, Stage
from vllm_omni_sched.connectors.tiers.duplicates import DuplicateFilter, Found, Tickets
from vllm_omni_sched.connectors.tiers.keeper import Keeper, TierCounts, Waits
from vllm_omni_sched.connectors.tiers.ledger import Item, Ledger, Owner
from vllm_omni_sched.connectors.tiers.options import TierRules
from vllm_omni_sched.connectors.tiers.place import Placer, Tier, View
from vllm_omni_sched.connectors.tiers.policy import Move
from vllm_omni_sched.connectors.tiers.worker import GetsFirst, Worker
from vllm_omni_sched.connectors.transport import Health, Lease, Status, Traffic

LOOKED_PER_PUT, LOOKED_PER_MOVE = 4, 256
PLANNING_SHARE = 0.02
"""Largest share of time spent on planning moves, because planning holds the interpreter lock."""


class TieredTransport(MediumTransport):
    """Transport through the first of several tiers, and through lower ones for messages that do not fit or wait long.

    1. A message is in one tier; while it is moved, in two, of which receivers see one. It is received once.
    2. A sender moves its own messages, in a thread that is started when there is something to move.
    3. Receivers look into all tiers, the first one first. While a message is moved, they see that it is not there yet.
    4. Only a lack of room puts messages into lower tiers: a receiver that is behind slows its sender, over all tiers.
    5. A message that no tier takes is refused.
    6. A get of this process takes precedence over moves.

    Args:
        tiers: the fastest first; receivers have the same.
        max_inflight, window_size: most messages and bytes of one edge that are not received yet.
        background: whether a thread calls `move`; if not, the caller does.

    Raises:
        ConfigError: there are fewer than two tiers, two have the same name, or one has no room.
    """

    name, title = "tiers", "the tiered transport"
    lost = ("refused", "expired", "moves_failed")
    first_wait, longest_wait = 50e-6, 5e-3

    def __init__(
        self,
        tiers: Sequence[Tier],
        rules: TierRules,
        max_inflight: int | None = None,
        window_size: int | None = None,
        clock: Clock = monotonic_seconds,
        sleep: Callable[[float], None] = sleep_seconds,
        background: bool = True,
    ) -> None:
        self._transports = [tier.transport for tier in tiers]
        if len({transport.name for transport in self._transports}) < max(2, len(tiers)):
            raise ConfigError("tiers need at least two transports, with different names")
        if not all(tier.capacity_bytes and min(tier.capacity_bytes.values()) > 0 for tier in tiers):
            raise ConfigError("a tier needs room: give the number of its bytes")
        capacities = [tier.pools() for tier in tiers]
        self._rules, self._max_inflight, self._window = rules, max_inflight, window_size
        super().__init__(clock, sleep)
        self._gets = GetsFirst()
        self._ids = itertools.count(secrets.randbits(63) | 1)
        self._waits = Waits(rules.expected_wait_seconds)
        self._costs = [Costs() for _ in tiers]
        self.ledger = Ledger([set(capacity) for capacity in capacities])
        disk = next((transport for transport in self._transports if isinstance(transport, DiskTransport)), None)
        tickets = None if disk is None else Tickets(disk.members, clock)
        self._duplicates = DuplicateFilter(tickets)
        self._carrier = Carrier(self._transports, self.ledger, self._costs, tickets, clock)
        self._keeper = Keeper(self._transports, self.ledger, self._waits, rules.ttl_seconds, clock)
        self._view = View(capacities, rules, self.ledger, self._costs, self._waits, clock)
        self._placer = Placer(self._transports, self.ledger, self._view, self._keeper, self._waits, self._costs, clock)
        self._worker = Worker(self.move, rules.interval_seconds) if background else None
        self._carried = threading.local()
        self._opened()

    @property
    def counts(self) -> TierCounts:
        return self._keeper.counts

    def progress(self) -> int:
        return self.ledger.progress

    def put(self, message: Message, deadline: float | None = None) -> int:
        message.id = next(self._ids) & 0xFFFFFFFFFFFFFFFF
        return super().put(message, deadline)

    def _send(self, message: Message) -> int | Refusal:
        self._keeper.look(self.ledger.next(LOOKED_PER_PUT))
        try:
            self._keeper.check_credit(message, self._max_inflight, self._window)
            tier, held_bytes = self._placer.put(message, modality_of(message).value)
        except NoRoomError as error:
            return Refusal(type(error), str(error))
        self._carried.by = self._transports[tier].carrier()
        if self._worker is not None and self._view.is_worth_a_plan():
            self._worker.wake()
        return held_bytes

    def _receive(self, edge: Edge, key: str) -> Arrival | None:
        with self._gets.getting():
            found = self._duplicates.kept(name_of(edge, key)) or self._find(edge, key)
            if found is None:
                return None
            first = self._duplicates.passes(found)
        with self._keeper.lock:
            if first:
                self.counts.got += 1
                self.counts.got_bytes += found.arrival.nbytes
            else:
                self.counts.repeated += 1
        self._carried.by = found.carrier
        return found.arrival if first else None

    def _holds(self, name: bytes) -> bool:
        item = self.ledger.get(name)
        return item is not None and (
            item.owner == Owner.MOVER or self._transports[item.tier].holds(item.edge, item.key)
        )

    def _withdraw(self, name: bytes) -> bool:
        item = self.ledger.get(name)
        lease = self._lease(item.edge, item.key) if item is not None else None
        if lease is not None:
            lease.consume()
        return lease is not None

    def _lease(self, edge: Edge, key: str) -> Lease | None:
        name = name_of(edge, key)
        with self.ledger.alone(name):
            item = self.ledger.get(name)
            if item is None or item.owner != Owner.NOBODY:
                return None
            lease = self._transports[item.tier].lease(edge, key)
            if lease is None:
                return None
            item.owner = Owner.CALLER

        def end(returned: bool) -> bool:
            with self.ledger.alone(name):
                item.owner = Owner.NOBODY
                if returned and self.ledger.get(name) is item and lease.give_back():
                    return True
                if not returned or self.ledger.get(name) is not item:
                    lease.consume()
                self._keeper.gone(item, "consumed")
                return False

        return Lease(lease.arrival, lambda: end(False), lambda: end(True))

    def _discard(self, key: str) -> int:
        names = self.ledger.of_key(key)
        with contextlib.ExitStack() as alone:
            for name in names:
                alone.enter_context(self.ledger.alone(name))
            items = [item for name in names if (item := self.ledger.get(name)) is not None]
            found = sum(transport.discard(key) for transport in self._transports)
            found += sum(item.owner == Owner.MOVER for item in items)
            for place, item in enumerate(items):
                self._keeper.gone(item, "discarded" if place < found else "consumed")
        return found

    def _reap(self, limit: int | None) -> int:
        gone = self._keeper.look(self.ledger.next(limit))
        for transport in self._transports:
            transport.reap(limit)
        return gone

    def carrier(self) -> str:
        return str(getattr(self._carried, "by", self.name))

    def _traffic(self) -> dict[Edge, Traffic]:
        """Return traffic under one name for all tiers, because a receiver that gets from one tier is well."""
        found = self._keeper.traffic()
        for transport in self._transports:
            for (_, edge), one in transport.traffic().items():
                if one.held:
                    found.setdefault(edge, Traffic()).held.extend(one.held)
        return found

    def moves(self) -> list[tuple[Item, Move]]:
        """Return the moves that should be made now, in order."""
        return self._view.moves()

    def carry(self, item: Item, move: Move) -> Iterator[Stage]:
        """Move one message; see `Carrier.carry`."""
        return self._carrier.carry(item, move.target, move.reason)

    def move(self) -> float | None:
        """Make all moves that are due; return the seconds until the next call, None to wait until woken."""
        began = self._clock()
        self._keeper.look(self.ledger.next(LOOKED_PER_MOVE))
        moves = self.moves()
        took = self._clock() - began
        for item, move in moves:
            self._gets.give_way()
            if self._closed:
                return None
            if self._carrier.takes(move.target):
                for _ in self.carry(item, move):
                    pass
        return max(self._rules.interval_seconds, took / PLANNING_SHARE) if self._view.is_worth_a_plan() else None

    def health(self) -> Health:
        tiers = {transport.name: transport.health() for transport in self._transports}
        health = super().health()
        facts = health.facts | {
            name: {"status": one.status.value, "reason": one.reason, **one.facts} for name, one in tiers.items()
        }
        status, reasons = health.status, [health.reason] if health.reason else []
        if status in (Status.HEALTHY, Status.DEGRADED):
            unwell = {name: one for name, one in tiers.items() if one.status is not Status.HEALTHY}
            reasons += [f"{name}: {one.reason}" for name, one in unwell.items()]
            if all(one.status is Status.SICK for one in tiers.values()):
                status = Status.SICK
            elif unwell:
                status = Status.DEGRADED
        return Health(status, "; ".join(reasons), facts)

    def _facts(self) -> dict[str, Any]:
        names = [transport.name for transport in self._transports]
        with self._keeper.lock:
            counts = self._keeper.counts.facts()
        moves = self._carrier.counts.facts()
        moves["moves_failed"] += self._worker.failures if self._worker is not None else 0
        held = Counter[str]()
        for (number, _), nbytes in list(self.ledger.used.items()):
            held[names[number]] += nbytes
        return {
            **counts,
            **moves,
            "in_flight": len(self.ledger),
            "tier_messages": {name: self.ledger.lying[number] for number, name in enumerate(names)},
            "tier_bytes": {name: held[name] for name in names},
        }

    def _close(self) -> None:
        if self._worker is not None:
            self._worker.close()
        self._duplicates.close()
        for transport in self._transports:
            transport.close()

    def _abandon(self) -> None:
        self._keeper.lock = threading.Lock()
        self.ledger.forget_locks()
        self._duplicates.forget_locks()
        self._gets.forget_locks()

    def _find(self, edge: Edge, key: str) -> Found | None:
        for number, transport in enumerate(self._transports):
            began = self._clock()
            arrival = transport.get(edge, key)
            if arrival is not None:
                if number:
                    self._costs[number].out.observe(arrival.nbytes, self._clock() - began)
                return Found(name_of(edge, key), arrival, transport.carrier())
        return None
