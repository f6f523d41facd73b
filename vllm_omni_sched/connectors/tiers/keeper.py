"""Updates the records of tiers: messages that were received, and messages that expired."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vllm_omni_sched.clock import Clock
from vllm_omni_sched.config.errors import ConnectorError, ReceiverBehindError
from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.framing import Message
from vllm_omni_sched.connectors.medium import MessageCounts
from vllm_omni_sched.connectors.tiers.ledger import Item, Ledger, Owner
from vllm_omni_sched.connectors.transport import InFlight, Traffic, Transport
from vllm_omni_sched.logs import get_logger
from vllm_omni_sched.resource.rate import Rate

logger = get_logger(__name__)


class Waits:
    """Learnt waiting times of the messages of each edge, in seconds.

    Args:
        start: expected wait before any was observed.
    """

    def __init__(self, start: float) -> None:
        self._start = start
        self._edges: dict[Edge, Rate] = {}

    def observe(self, edge: Edge, seconds: float) -> None:
        """Record the wait of a received message."""
        self._edges.setdefault(edge, Rate(self._start)).observe(1, seconds)

    def expected(self, edge: Edge) -> float:
        """Return the expected wait of a message that is put now."""
        rate = self._edges.get(edge)
        return self._start if rate is None else rate.per_unit


@dataclass
class TierCounts(MessageCounts):
    """Counts of the outcomes of messages."""

    got: int = 0
    got_bytes: int = 0
    repeated: int = 0  # copies of messages that were received before, left by a dead mover
    placed: Counter[str] = field(default_factory=Counter)  # put, by tier and reason

    def facts(self) -> dict[str, Any]:
        """Return numbers for `Health.facts`."""
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()}


class Keeper:
    """Keeper of the records: checks messages regularly, and learns how long they waited."""

    def __init__(
        self, transports: Sequence[Transport], ledger: Ledger, waits: Waits, ttl_seconds: float, clock: Clock
    ) -> None:
        self._transports, self._ledger, self._waits = transports, ledger, waits
        self._ttl_seconds, self._clock = ttl_seconds, clock
        self.lock = threading.Lock()  # of the counts and the learnt waits
        self.counts = TierCounts()
        self._last: dict[Edge, Traffic] = {}  # the last received messages

    def check_credit(self, message: Message, max_inflight: int | None, window: int | None) -> None:
        """Check that the receiver of an edge is not too far behind; one message is always allowed.

        Raises:
            ReceiverBehindError: the receiver has to receive earlier messages first.
        """
        edge, ledger = message.edge, self._ledger
        for again in (True, False):
            waiting, nbytes = ledger.waiting[edge], ledger.waiting_bytes[edge]
            over = max_inflight is not None and waiting >= max_inflight
            over = over or (window is not None and nbytes + message.nbytes > window)
            if not (over and waiting):
                return
            if again:
                self.look(ledger.of_edge(edge))
        raise ReceiverBehindError(
            f"edge {edge} has {waiting} messages ({nbytes} bytes) that were not received yet; "
            "its `max_inflight` or `window_size` allows no more"
        )

    def look(self, items: Sequence[Item]) -> int:
        """Remove received messages from the records, and take back expired ones; return how many.

        A message that cannot be checked is checked again next time, so that the caller's own message is not affected.
        """
        gone, now = 0, self._clock()
        for item in items:
            try:
                gone += self._look_at(item, now)
            except ConnectorError as error:
                log = logger.debug if item.troubled else logger.warning
                log("message %r of %s cannot be looked at; it is tried again: %s", item.key[:80], item.edge, error)
                item.troubled = True
        return gone

    def _look_at(self, item: Item, now: float) -> bool:
        late = now - item.put_at > self._ttl_seconds
        if item.owner != Owner.NOBODY or (not late and self._transports[item.tier].holds(item.edge, item.key)):
            return False
        with self._ledger.alone(item.name, wait=False) as alone:
            if not alone or item.owner != Owner.NOBODY or self._ledger.get(item.name) is not item:
                return False
            if late:
                return self._expire(item)
            if self._transports[item.tier].holds(item.edge, item.key):
                return False
            with self.lock:
                self._waits.observe(item.edge, now - item.put_at)
            return self.gone(item, "consumed")

    def _expire(self, item: Item) -> bool:
        transport = self._transports[item.tier]
        if transport.withdraw(item.edge, item.key):
            logger.warning(
                "message %r of edge %s expired, because it was not received in time", item.key[:80], item.edge
            )
        elif transport.holds(item.edge, item.key):
            return False
        return self.gone(item, "expired")  # where it was not there, its tier was first

    def traffic(self) -> dict[Edge, Traffic]:
        """Return the messages in flight by edge, as of the last check; only its tier knows what receivers hold."""
        with self.lock:
            found = {edge: replace(last, waiting=[], held=[]) for edge, last in self._last.items()}
        for item in self._ledger.all():
            found.setdefault(item.edge, Traffic()).waiting.append(InFlight(item.put_at, item.nbytes))
        return found

    def gone(self, item: Item, why: str) -> bool:
        """Remove a message for a reason, a name in `TierCounts`; return False if it was removed before."""
        if not self._ledger.leave(item):
            return False
        with self.lock:
            setattr(self.counts, why, getattr(self.counts, why) + 1)
            if why == "consumed":
                self._last.setdefault(item.edge, Traffic()).got(item.put_at, self._clock())
        return True
