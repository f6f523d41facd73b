"""Moves of single messages between tiers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from vllm_omni_sched.clock import Clock
from vllm_omni_sched.config.errors import ConnectorError, CorruptMessageError
from vllm_omni_sched.connectors.framing import message_of
from vllm_omni_sched.connectors.routing.route import RetrySchedule, TransferCost
from vllm_omni_sched.connectors.tiers.duplicates import Tickets
from vllm_omni_sched.connectors.tiers.ledger import Item, Ledger, Owner
from vllm_omni_sched.connectors.tiers.policy import TierReason
from vllm_omni_sched.connectors.transport import Lease, Transport
from vllm_omni_sched.logs import get_logger

logger = get_logger(__name__)


class Stage(str, Enum):
    """Stage of a move."""

    LEASED = "leased"  # in its old tier, where receivers cannot get it
    DOUBLED = "doubled"  # in its new one, where they can, and in the old one, where they cannot


@dataclass
class Costs:
    """Costs of moving into a tier, and out of it."""

    into: TransferCost = field(default_factory=TransferCost)
    out: TransferCost = field(default_factory=TransferCost)


@dataclass
class MoveCounts:
    """Counts of moves, by ``from->to reason``."""

    moved: Counter[str] = field(default_factory=Counter)
    moved_bytes: Counter[str] = field(default_factory=Counter)
    move_seconds: dict[str, float] = field(default_factory=dict)
    moves_refused: int = 0  # by the tier that a message was to go to
    moves_too_late: int = 0  # it was received, discarded or replaced meanwhile
    moves_failed: int = 0  # for reasons that are in the log

    def facts(self) -> dict[str, Any]:
        """Return numbers for `Health.facts`."""
        return {name: dict(value) if isinstance(value, dict) else value for name, value in vars(self).items()}


class Carrier:
    """Mover of messages between tiers, so that each is received once even if a process dies.

    1. The message is leased: receivers do not find it, unless this process dies.
    2. It is put into its new tier. Meanwhile, its ticket shows that there may be two copies.
    3. The lease is consumed. A thread that discards or replaces the message waits for one copy to be written at most.

    If the new tier refuses the message, it is given back to the old one. A message that was discarded or replaced in
    between is not put anywhere.
    """

    def __init__(
        self,
        transports: Sequence[Transport],
        ledger: Ledger,
        costs: Sequence[Costs],
        tickets: Tickets | None,
        clock: Clock,
    ) -> None:
        self._transports, self._ledger, self._costs, self._tickets, self._clock = (
            transports,
            ledger,
            costs,
            tickets,
            clock,
        )
        self._retries = [RetrySchedule() for _ in transports]
        self.counts = MoveCounts()

    def takes(self, tier: int) -> bool:
        """Return whether to try to move messages to a tier: after a refusal, the pauses between attempts grow."""
        return self._retries[tier].well or self._retries[tier].is_due(self._clock())

    def carry(self, item: Item, target: int, reason: TierReason) -> Iterator[Stage]:
        """Move a message; other threads may act between the yielded stages. Iterate to the end, in one thread."""
        source, began = item.tier, self._clock()
        with self._ledger.alone(item.name):
            lease = self._lease(item)
        if lease is None:
            self.counts.moves_too_late += 1
            return
        if source:
            self._costs[source].out.observe(item.nbytes, self._clock() - began)
        yield Stage.LEASED
        with self._ledger.alone(item.name):
            put = self._put(item, lease, target)
        if not put:
            return
        yield Stage.DOUBLED
        lease.consume()
        if self._tickets is not None:
            self._tickets.remove(item.id)
        name = f"{self._transports[source].name}->{self._transports[target].name} {reason.value}"
        self.counts.moved[name] += 1
        self.counts.moved_bytes[name] += item.nbytes
        seconds = self.counts.move_seconds
        seconds[name] = seconds.get(name, 0.0) + self._clock() - began

    def _lease(self, item: Item) -> Lease | None:
        if self._ledger.get(item.name) is not item or item.owner != Owner.NOBODY:
            return None
        try:
            lease = self._transports[item.tier].lease(item.edge, item.key)
        except CorruptMessageError as error:
            logger.error(
                "message %r of edge %s was damaged in its tier, and is lost: %s", item.key[:80], item.edge, error
            )
            self._ledger.leave(item)
            return None
        if lease is not None and lease.arrival.id != item.id:
            lease.give_back()
            return None
        if lease is not None:
            item.owner = Owner.MOVER
        return lease

    def _put(self, item: Item, lease: Lease, target: int) -> bool:
        if self._ledger.get(item.name) is not item:
            lease.consume()
            self.counts.moves_too_late += 1
            return False
        message = message_of(lease.arrival, item.edge, item.key)
        message.longest = item.longest
        began, held_bytes = self._clock(), None
        try:
            if self._tickets is not None:
                self._tickets.write(item.id)
            held_bytes = self._transports[target].put(message, None)
        except (ConnectorError, OSError) as error:
            self.counts.moves_refused += 1
            self._retries[target].refused(self._clock())
            logger.debug("message %r of %s stays where it is: %s", item.key[:80], item.edge, error)
        finally:
            item.owner = Owner.NOBODY
            if held_bytes is None:
                self._stay(item, lease)
        if held_bytes is None:
            return False
        self._retries[target].took()
        self._costs[target].into.observe(message.nbytes, self._clock() - began)
        self._ledger.move(item, target, held_bytes)
        return True

    def _stay(self, item: Item, lease: Lease) -> None:
        try:
            returned = lease.give_back()
        except ConnectorError as error:
            said = "message %r of edge %s is lost: its tier did not take it back: %s"
            logger.error(said, item.key[:80], item.edge, error)
            self.counts.moves_failed += 1
            returned = False
        if not returned:
            self._ledger.leave(item)
        if self._tickets is not None:
            self._tickets.remove(item.id)
