"""Transport that combines several others."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from vllm_omni_sched.clock import Clock, monotonic_seconds
from vllm_omni_sched.config.errors import (
    ConfigError,
    ConnectorError,
    MessageTooLargeError,
    NoRoomError,
    ReceiverBehindError,
    RendezvousError,
    TransportClosedError,
)
from vllm_omni_sched.connectors.compression.compressor import Compressor
from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.framing import Arrival, Message
from vllm_omni_sched.connectors.packing import pack
from vllm_omni_sched.connectors.routing.link_speeds import KEY, LinkSpeeds, read_report, report_message
from vllm_omni_sched.connectors.routing.presence import Presence
from vllm_omni_sched.connectors.routing.route import Attempt, RetrySchedule, RouteReason, TransportState, route
from vllm_omni_sched.connectors.transport import Arrivals, Health, Status, Traffic, Transport
from vllm_omni_sched.logs import get_logger

logger = get_logger(__name__)

REMEMBERED = 1 << 14
"""Number of messages whose last transport is remembered."""


@dataclass(frozen=True)
class Way:
    """Transport and its distance: 0 within a host, 1 between hosts."""

    transport: Transport
    distance: int


class RoutingOptions(BaseModel):
    """Options of routing. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    edges: dict[str, list[str]] = Field(
        default_factory=dict,
        description="Transports that reach the receiver of an edge ('0->1'), by name; default: those between hosts, "
        "and those within this host while the receiver's stage is on it.",
    )
    replicas: dict[str, int] = Field(
        default_factory=dict,
        description="How many replicas a stage ('1') has on all hosts together, if some are on other hosts; default: "
        "the replicas that are found on this host.",
    )

    @field_validator("edges")
    @classmethod
    def _edges_are_named(cls, value: dict[str, list[str]]) -> dict[str, list[str]]:
        for edge, ways in value.items():
            stages = edge.split("->")
            if len(stages) != 2 or not all(stages) or edge != "".join(edge.split()):
                raise ValueError(f"{edge!r} names no edge: write the ids of its two stages, as '0->1'")
            if not ways:
                raise ValueError(f"{edge!r} has no transport: name one or more, or leave it out for all of them")
        return value

    @field_validator("replicas", mode="before")
    @classmethod
    def _stages_are_named(cls, value: Any) -> Any:
        if isinstance(value, dict):
            for stage, count in value.items():
                if not str(stage).strip() or "->" in str(stage):
                    raise ValueError(f"{stage!r} names no stage: write its id, as '1'")
                if isinstance(count, bool) or (isinstance(count, int) and count < 1):
                    raise ValueError(
                        f"stage {stage!r} must have 1 replica or more, got {count}; leave out what has none"
                    )
        return value


class RoutedTransport(Transport):
    """Transport that sends each message by the nearest of several transports, and receives from all of them.

    1. A transport that refuses a message is sick: the next one takes the message, and the sick one is tried again after
       a while. A receiver that is behind, or a message that is too large, does not make a transport sick.
    2. A message is in one transport at a time. If no transport takes it, `put` raises an error with all refusals.
    3. Buffers are compressed for transports between hosts where that saves time, never within a host. For this,
       receivers report the speed of the link.
    4. If there is a transport between hosts, transports within a host are used only for stages that are announced on
       this host. The option `edges` overrides this.

    Args:
        presence: stages on this host, closed with the transports; None: all stages are on this host.

    Raises:
        ConfigError: there is no transport, two have the same name, or an edge names one that does not exist.
    """

    name = "auto"

    def __init__(
        self,
        ways: Sequence[Way],
        options: RoutingOptions,
        compressor: Compressor | None = None,
        clock: Clock = monotonic_seconds,
        presence: Presence | None = None,
    ) -> None:
        self._ways = {way.transport.name: way for way in ways}
        if not ways or len(self._ways) < len(ways):
            raise ConfigError("routing needs at least one transport, and transports with different names")
        for edge, names in options.edges.items():
            if not names or not set(names) <= self._ways.keys():
                raise ConfigError(f"option `edges`: {edge!r} names {names}; there are {sorted(self._ways)}")
        self._options, self._compressor, self._clock, self._presence = options, compressor, clock, presence
        self._only = (Attempt(ways[0].transport.name, RouteReason.ONLY),) if len(ways) == 1 else ()
        self._some_go_far = any(way.distance for way in ways)
        self._links = LinkSpeeds()
        # of the next five; never held during a call of a transport
        self._lock = threading.Lock()
        self._retries = {name: RetrySchedule() for name in self._ways}
        self.served: Counter[tuple[Edge, str, RouteReason]] = Counter()
        self.served_bytes: Counter[tuple[Edge, str]] = Counter()
        self.fell_back: Counter[str] = Counter()
        self._last_way: OrderedDict[bytes, str] = OrderedDict()  # by name of a message: the transport of its last put
        self._looking = threading.Lock()
        self._here: dict[str, bool] = {}  # by stage: whether all its replicas were on this host at the last put
        self._carried = threading.local()
        self._closed = False

    def put(self, message: Message, deadline: float | None = None) -> int:
        if self._closed:
            raise TransportClosedError("routing was closed before this put")
        attempts = self._only or route(self._states(message))
        refusals: list[tuple[str, ConnectorError]] = []
        for place, attempt in enumerate(attempts):
            way, last = self._ways[attempt.name], place == len(attempts) - 1
            sent = self._packed(message, way)
            try:
                try:
                    held_bytes = way.transport.put(sent, deadline if last else None)
                except ReceiverBehindError:  # slows the sender down; other transports are not used to bypass it
                    held_bytes = way.transport.put(sent, deadline)
            except ReceiverBehindError:
                raise
            except ConnectorError as error:
                refusals.append((attempt.name, error))
                if not isinstance(error, MessageTooLargeError):
                    self._refused(attempt.name, error)
                continue
            self._carried.by = way.transport.carrier()
            self._took(attempt, sent)
            if self._reports(way) and self._links.put(sent.edge, attempt.name):
                self._read_report(sent.edge, attempt.name)
            if len(self._ways) > 1:
                self._replace(message, attempt.name)
            return held_bytes
        never = refusals and all(isinstance(error, MessageTooLargeError) for _, error in refusals)
        said = "; ".join(f"{name}: {error}" for name, error in refusals) or "none reaches it"
        kind = MessageTooLargeError if never else NoRoomError
        raise kind(f"no transport takes a message on edge {message.edge}: {said}")

    def _took(self, attempt: Attempt, sent: Message) -> None:
        name, edge = attempt.name, sent.edge
        with self._lock:
            if not self._retries[name].well:
                logger.warning("transport %s takes messages again", name)
            self._retries[name].took()
            self.served[edge, name, attempt.reason] += 1
            self.served_bytes[edge, name] += sent.nbytes

    def _refused(self, name: str, error: Exception) -> None:
        with self._lock:
            if self._retries[name].well:
                logger.warning("transport %s refused a message: %s", name, error)
            self._retries[name].refused(self._clock())
            self.fell_back[name] += 1

    def _replace(self, message: Message, name: str) -> None:
        """Take back an unreceived message that was put under the same key by another transport."""
        with self._lock:
            before = self._last_way.pop(message.name, name)
            self._last_way[message.name] = name
            if len(self._last_way) > REMEMBERED:
                self._last_way.popitem(last=False)
        if before != name:
            # a transport that does not answer has lost it, or delivers it later
            with contextlib.suppress(ConnectorError):
                self._ways[before].transport.withdraw(message.edge, message.key)

    def get(self, edge: Edge, key: str) -> Arrival | None:
        if self._closed:
            raise TransportClosedError("routing was closed before this get")
        trouble: RendezvousError | None = None
        for name in self._reaching(edge):
            started = self._clock()
            try:
                found = self._ways[name].transport.get(edge, key)
            except RendezvousError as error:  # another transport may have it
                trouble = error
                continue
            if found is not None:
                self._carried.by = self._ways[name].transport.carrier()
                self._got(edge, name, found.nbytes, self._clock() - started)
                if self._compressor is not None:
                    found.unpack(self._compressor.decompress)
                return found
        if trouble is not None:
            raise trouble
        return None

    def arrivals(self, edge: Edge) -> Arrivals | None:
        reaching = self._reaching(edge)  # no one tells of several transports
        return self._ways[reaching[0]].transport.arrivals(edge) if len(reaching) == 1 else None

    def withdraw(self, edge: Edge, key: str) -> bool:
        return sum(way.transport.withdraw(edge, key) for way in self._ways.values()) > 0

    def discard(self, key: str) -> int:
        return sum(way.transport.discard(key) for way in self._ways.values())

    def reap(self, limit: int | None = None) -> int:
        return sum(way.transport.reap(limit) for way in self._ways.values())

    def carrier(self) -> str:
        return str(getattr(self._carried, "by", self.name))

    def traffic(self) -> dict[tuple[str, Edge], Traffic]:
        found = [item for way in self._ways.values() for item in way.transport.traffic().items()]
        with self._lock:  # edges that only have reports are left out
            sent = {edge for edge, _ in self.served_bytes}
        return {(name, edge): one for (name, edge), one in found if edge in sent}

    def health(self) -> Health:
        found = {name: way.transport.health() for name, way in self._ways.items()}
        with self._lock:
            sick = [name for name, retries in self._retries.items() if not retries.well]
            facts: dict[str, Any] = {
                "served": {f"{edge} {name} {why.value}": n for (edge, name, why), n in sorted(self.served.items())},
                "served_bytes": {f"{edge} {name}": n for (edge, name), n in sorted(self.served_bytes.items())},
                "fell_back": dict(self.fell_back),
            }
        facts["stages_here"] = dict(self._here)
        if self._compressor is not None:
            facts |= self._compressor.facts()
        facts |= {name: {"status": one.status.value, "reason": one.reason, **one.facts} for name, one in found.items()}
        if self._closed:
            return Health(Status.CLOSED, "it was closed", facts)
        unwell = sorted({name for name, one in found.items() if one.status != Status.HEALTHY} | set(sick))
        if not unwell:
            return Health(Status.HEALTHY, "", facts)
        reason = "; ".join(f"{name}: {found[name].reason or 'refused its last message'}" for name in unwell)
        all_sick = all(one.status is Status.SICK for one in found.values()) or len(sick) == len(self._ways)
        return Health(Status.SICK if all_sick else Status.DEGRADED, reason, facts)

    def close(self) -> None:
        self._closed = True
        if self._presence is not None:
            self._presence.close()
        for way in self._ways.values():
            way.transport.close()

    def _reaching(self, edge: Edge) -> list[str]:
        return self._options.edges.get(str(edge)) or list(self._ways)

    def _states(self, message: Message) -> list[TransportState]:
        here, now, states = self._is_here(message.edge), self._clock(), []
        with self._lock:
            for name in self._reaching(message.edge):
                distance, retries = self._ways[name].distance, self._retries[name]
                states.append(TransportState(name, distance, here or distance > 0, retries.well, retries.is_due(now)))
        return states

    def _is_here(self, edge: Edge) -> bool:
        """Return whether transports within this host reach the receiver of an edge, as far as known."""
        if self._presence is None or not self._some_go_far or str(edge) in self._options.edges:
            return True
        with self._looking:
            here = self._presence.is_here(edge.target, self._options.replicas.get(edge.target, 1))
        if here != self._here.get(edge.target):
            self._here[edge.target] = here
            logger.info("stage %s is %s this host", edge.target, "on" if here else "not, or not yet, on")
        return here

    def _packed(self, message: Message, way: Way) -> Message:
        if self._compressor is None or not way.distance:
            return message
        link = self._links.bytes_per_second(message.edge, way.transport.name)
        return pack(message, self._compressor, link)

    def _reports(self, way: Way) -> bool:
        """Return whether receivers report the speed of a link: senders need it to decide about compression."""
        return self._compressor is not None and way.distance > 0

    def _got(self, edge: Edge, name: str, nbytes: int, seconds: float) -> None:
        if not self._reports(self._ways[name]) or (report := self._links.got(edge, name, nbytes, seconds)) is None:
            return
        with contextlib.suppress(ConnectorError):  # the next one will do
            self._ways[name].transport.put(report_message(edge, name, report))

    def _read_report(self, edge: Edge, name: str) -> None:
        with contextlib.suppress(ConnectorError):
            found = self._ways[name].transport.get(Edge(edge.target, edge.source), KEY + name)
            if found is not None:
                self._links.observe(edge, name, read_report(found))
