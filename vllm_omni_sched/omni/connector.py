"""Implement vLLM-Omni's connector interface on top of one of our transports."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from vllm_omni.distributed.omni_connectors.connectors.shm_connector import SharedMemoryConnector

from vllm_omni_sched.clock import monotonic_seconds, sleep_seconds
from vllm_omni_sched.config.errors import ConnectorError
from vllm_omni_sched.connectors.arrivals import Arrivals
from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.extra import read_watch
from vllm_omni_sched.connectors.latency_histogram import LatencyHistogram
from vllm_omni_sched.connectors.receive_queue import Missed
from vllm_omni_sched.connectors.transport import Health, Status, Transport
from vllm_omni_sched.connectors.watch import Watch
from vllm_omni_sched.logs import get_logger
from vllm_omni_sched.omni.metrics import metrics_of_this_process
from vllm_omni_sched.omni.payloads import pack, unpack

logger = get_logger(__name__)

REAPED = 64  # messages checked in one `reap_consumed`
SHORTEST_POLL, LONGEST_POLL = 50e-6, 1e-3  # seconds between two polls for a message


@lru_cache(maxsize=1024)
def _edge(from_stage: str, to_stage: str) -> Edge:
    return Edge(str(from_stage), str(to_stage))  # vLLM-Omni also passes numbers


class TransportConnector(SharedMemoryConnector):
    """Connector of vLLM-Omni's stages through one of our transports.

    It subclasses SharedMemoryConnector because vLLM-Omni withdraws the messages of an aborted request from no other
    class (`OmniChunkTransferAdapter._queue_shm_cleanup_locked`).

    Args:
        config: ``extra`` of the connector in the stage config, with the keys that vLLM-Omni adds.
        transport: makes the transport after the options are checked.
        put_timeout_seconds: how long `put` waits for room.
    """

    def __init__(self, config: dict[str, Any], transport: Callable[[], Transport], put_timeout_seconds: float) -> None:
        super().__init__(config)
        self._put_timeout = put_timeout_seconds
        self.watch = Watch(read_watch(config))
        self._watching = threading.Lock()
        self.times: dict[tuple[str, str], LatencyHistogram] = {}  # by one of `TIMES` and the transport
        self._transport: Transport | None = transport()
        self._arrivals: dict[Edge, Arrivals | None] = {}
        self._last_missed = threading.local()
        metrics_of_this_process(self.stage_id).add(self)

    @property
    def transport(self) -> Transport:
        """Return the transport of all messages.

        Raises:
            ConnectorError: the connector could not be made.
        """
        if self._transport is None:
            raise ConnectorError("this connector was never opened")
        return self._transport

    def put(self, from_stage: str, to_stage: str, put_key: str, data: Any) -> tuple[bool, int, dict[str, Any] | None]:
        """Send a message; return ``(False, 0, None)`` if it cannot be sent, which makes vLLM-Omni fail the request.

        Returns:
            Whether it was sent, its bytes, and metadata that the receiver does not need.
        """
        started = monotonic_seconds()
        try:
            carrier = self.transport
            message = pack(_edge(from_stage, to_stage), put_key, data)
            carrier.put(message, started + self._put_timeout)
        except ConnectorError as error:
            logger.error("%s: message %r was not sent: %s", type(self).__name__, put_key[:80], error)
            return False, 0, None
        name = carrier.carrier()
        self._took("put", name, monotonic_seconds() - started)
        return True, message.nbytes, {"path": name, "size": message.nbytes}

    def get(
        self, from_stage: str, to_stage: str, get_key: str, metadata: dict[str, Any] | None = None
    ) -> tuple[Any, int] | None:
        """Return the payload and its bytes, or None; ``metadata`` is not needed.

        Raises:
            CorruptMessageError: the message is damaged; it is dropped.
        """
        started, carrier = monotonic_seconds(), self.transport
        edge = _edge(from_stage, to_stage)
        self._last_missed.message = None
        arrival = carrier.get(edge, get_key)
        if arrival is None:
            self._last_missed.message = edge, get_key
            return None
        payload = unpack(arrival)
        now, name = monotonic_seconds(), carrier.carrier()
        self._took("get", name, now - started)
        if arrival.put_at is not None:
            self._took("transfer", name, now - arrival.put_at)
        return payload, arrival.nbytes

    def missed(self) -> Missed | None:
        """Return what this thread's last `get` has not found; None if it has, or if nobody tells when it is there."""
        message = getattr(self._last_missed, "message", None)
        if message is None:
            return None
        edge, key = message
        if edge not in self._arrivals:
            self._arrivals[edge] = self.transport.arrivals(edge)
        arrivals = self._arrivals[edge]
        return None if arrivals is None else Missed(arrivals, key)

    def get_with_deadline(
        self,
        from_stage: str,
        to_stage: str,
        get_key: str,
        metadata: dict[str, Any] | None = None,
        *,
        deadline: float,
    ) -> tuple[Any, int] | None:
        """Return a message like `get`, waiting until ``deadline`` (of the monotonic clock)."""
        wait = SHORTEST_POLL
        while (left := deadline - monotonic_seconds()) > 0:
            found = self.get(from_stage, to_stage, get_key, metadata)
            if found is not None:
                return found
            sleep_seconds(min(wait, left))
            wait = min(2 * wait, LONGEST_POLL)
        return None

    def cleanup(self, request_id: str) -> None:
        """Withdraw messages that were put under exactly this key and not received yet."""
        self.transport.discard(request_id)

    def reap_consumed(self) -> None:
        """Free the room of messages that were received."""
        self.transport.reap(REAPED)

    def health(self) -> dict[str, Any]:
        """Return the health: ``status`` is "healthy" or the problem, ``reason`` the cause; the rest are numbers."""
        health = self.look()
        return {"status": health.status.value, "reason": health.reason, **health.facts}

    def look(self) -> Health:
        """Return the health of the transport and the findings of the watch, and log new ones; the metrics poll it."""
        health, now = self.transport.health(), monotonic_seconds()
        with self._watching:
            for finding in self.watch.look(self.transport.traffic(), now):
                logger.warning("%s: %s", type(self).__name__, finding)
            found, alarms = list(self.watch.current.values()), self.watch.counts.copy()
        status = Status.DEGRADED if found and health.status is Status.HEALTHY else health.status
        facts = {
            "alarms": {f"{edge} {alarm.value}": count for (alarm, edge), count in alarms.items()},
            "seconds": {f"{what} {name}": dict(times.facts()) for (what, name), times in list(self.times.items())},
        }
        return Health(status, "; ".join(filter(None, [health.reason, *map(str, found)])), health.facts | facts)

    def _took(self, what: str, transport: str, seconds: float) -> None:
        times = self.times.get((what, transport))
        if times is None:
            times = self.times.setdefault((what, transport), LatencyHistogram())
        times.observe(seconds)

    def close(self) -> None:
        """Release all resources; messages on their way stay available to live receivers."""
        transport = getattr(self, "_transport", None)  # `__del__` also calls this when the constructor has failed
        if transport is not None:
            transport.close()
