"""Several transports as tiers: a message that does not fit into the first one is stored in the next, and read there."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from vllm_omni_sched.clock import Clock, monotonic_seconds, sleep_seconds
from vllm_omni_sched.config.errors import (
    ConfigError,
    ConnectorError,
    MessageTooLargeError,
    NoRoomError,
    ReceiverBehindError,
    TransportClosedError,
)
from vllm_omni_sched.connectors.disk import DiskOptions
from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.framing import Arrival, Message
from vllm_omni_sched.connectors.medium import Credit, MediumTransport, MessageCounts, Refusal
from vllm_omni_sched.connectors.mooncake import MooncakeOptions
from vllm_omni_sched.connectors.transport import Health, Status, Traffic


class TiersOptions(BaseModel):
    """Options of the tiers below the first. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mooncake: MooncakeOptions | None = Field(
        None, description="Options of a Mooncake store as a tier, above the disk; null: none."
    )
    disk: DiskOptions | None = Field(DiskOptions(), description="Options of files as a tier; null: none.")

    @model_validator(mode="after")
    def _some(self) -> TiersOptions:
        if self.mooncake is None and self.disk is None:
            raise ValueError("name a tier, `disk` or `mooncake`")
        return self


ENDS = ("consumed", "discarded", "expired")
"""Counts that are those of all tiers together."""


class TieredTransport(MediumTransport):
    """Transport through the first of several tiers that has room for a message.

    1. A message stays in its tier until it is received, discarded, replaced or expires there.
    2. Receivers look into all tiers, the first one first.
    3. Only a lack of room puts messages into lower tiers: a receiver that is behind slows its sender, over all tiers.
    4. A message that no tier takes is refused.

    Args:
        tiers: the fastest first; receivers have the same.
        credit: limits for the messages of all tiers together.

    Raises:
        ConfigError: there are fewer than two tiers, or two have the same name.
    """

    name, title, lost = "tiers", "the tiered transport", ("refused",)
    first_wait, longest_wait = 50e-6, 5e-3

    def __init__(
        self,
        tiers: Sequence[MediumTransport],
        credit: Credit | None = None,
        clock: Clock = monotonic_seconds,
        sleep: Callable[[float], None] = sleep_seconds,
    ) -> None:
        super().__init__(clock, sleep, credit)
        if len({tier.name for tier in tiers}) < max(2, len(tiers)):
            raise ConfigError("tiers need at least two transports, with different names")
        self.tiers = tiers
        self._counts = MessageCounts()
        self._received = {"got": 0, "got_bytes": 0}
        self._carried = threading.local()
        self._opened()

    @property
    def counts(self) -> MessageCounts:
        return self._counts

    def progress(self) -> int:
        return sum(tier.progress() for tier in self.tiers)

    def credited(self) -> tuple[Mapping[Edge, int], Mapping[Edge, int]]:
        messages, nbytes = Counter[Edge](), Counter[Edge]()
        for tier in self.tiers:
            waiting, waiting_bytes = tier.credited()
            messages.update(waiting)
            nbytes.update(waiting_bytes)
        return messages, nbytes

    def carrier(self) -> str:
        return str(getattr(self._carried, "by", self.name))

    def health(self) -> Health:
        found, own = {tier.name: tier.health() for tier in self.tiers}, super().health()
        facts = own.facts | {
            name: {"status": one.status.value, "reason": one.reason, **one.facts} for name, one in found.items()
        }
        unwell = {name: one for name, one in found.items() if one.status is not Status.HEALTHY}
        if own.status in (Status.SICK, Status.CLOSED) or not unwell:
            return Health(own.status, own.reason, facts)
        status = Status.SICK if all(one.status is Status.SICK for one in found.values()) else Status.DEGRADED
        reasons = [own.reason, *(f"{name}: {one.reason}" for name, one in unwell.items())]
        return Health(status, "; ".join(filter(None, reasons)), facts)

    def _make_locks(self) -> None:
        super()._make_locks()
        self._send_lock = threading.RLock()
        self._count_lock = threading.Lock()

    def _send(self, message: Message) -> int | Refusal:
        if (behind := self._behind(message.edge, message.nbytes)) is not None:
            return behind
        refusals: list[tuple[str, ConnectorError]] = []
        for tier in self.tiers:
            try:
                held_bytes = tier.put(message)
            except ReceiverBehindError as error:
                return Refusal(type(error), str(error))
            except TransportClosedError:
                raise
            except ConnectorError as error:
                refusals.append((tier.name, error))
                continue
            for other in self.tiers:
                if other is not tier:  # an earlier message of that name, which it replaces
                    with contextlib.suppress(ConnectorError):
                        self._counts.replaced += other.withdraw(message.edge, message.key)
            self._carried.by = tier.carrier()
            self._counts.put += 1
            self._counts.put_bytes += message.nbytes
            return held_bytes
        never = all(isinstance(error, MessageTooLargeError) for _, error in refusals)
        said = "; ".join(f"{name}: {error}" for name, error in refusals)
        return Refusal(
            MessageTooLargeError if never else NoRoomError,
            f"no room for {message.nbytes} bytes on edge {message.edge} in any tier: {said}",
        )

    def _receive(self, edge: Edge, key: str) -> Arrival | None:
        for tier in self.tiers:
            if (arrival := tier.get(edge, key)) is not None:
                self._carried.by = tier.carrier()
                with self._count_lock:
                    self._received["got"] += 1
                    self._received["got_bytes"] += arrival.nbytes
                return arrival
        return None

    def _withdraw(self, edge: Edge, key: str) -> bool:
        return sum(tier.withdraw(edge, key) for tier in self.tiers) > 0

    def _discard(self, key: str) -> int:
        return sum(tier.discard(key) for tier in self.tiers)

    def _reap(self, limit: int | None) -> int:
        return sum(tier.reap(limit) for tier in self.tiers)

    def _traffic(self) -> Mapping[Edge, Traffic]:
        """Return traffic under one name for all tiers, because a receiver that gets from one tier is well."""
        found: dict[Edge, Traffic] = {}
        for tier in self.tiers:
            for (_, edge), one in tier.traffic().items():
                found.setdefault(edge, Traffic()).add(one)
        return found

    def _facts(self) -> dict[str, Any]:
        credited = {tier.name: tier.credited() for tier in self.tiers}
        messages = {name: sum(waiting.values()) for name, (waiting, _) in credited.items()}
        ends = {name: sum(getattr(tier.counts, name) for tier in self.tiers) for name in ENDS}
        return {
            **self._counts.facts(),
            **ends,
            **self._received,
            "in_flight": sum(messages.values()),
            "tier_messages": messages,
            "tier_bytes": {name: sum(nbytes.values()) for name, (_, nbytes) in credited.items()},
        }

    def _close(self) -> None:
        for tier in self.tiers:
            tier.close()

    def _abandon(self) -> None:
        """Do nothing: each tier releases what it has inherited."""
