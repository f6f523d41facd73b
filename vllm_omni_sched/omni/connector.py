"""Our connectors for vLLM-Omni, each on top of one of our transports."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from vllm_omni.distributed.omni_connectors.connectors.shm_connector import SharedMemoryConnector

from vllm_omni_sched.clock import monotonic_seconds, sleep_seconds
from vllm_omni_sched.config.errors import ConfigError, ConnectorError
from vllm_omni_sched.connectors.arena import ArenaOptions, ArenaTransport
from vllm_omni_sched.connectors.arena.meeting import ARENA_VARIABLE, sweep
from vllm_omni_sched.connectors.auto import AutoOptions, MoreWays, auto_transport
from vllm_omni_sched.connectors.cuda_ipc import CudaIpcTransport
from vllm_omni_sched.connectors.cuda_ipc.share import CudaIpcConnectorOptions
from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.extra import ENGINES, read_extra, read_watch
from vllm_omni_sched.connectors.latency_histogram import LatencyHistogram
from vllm_omni_sched.connectors.mooncake import MooncakeOptions, MooncakeTransport
from vllm_omni_sched.connectors.receive_queue import Missed
from vllm_omni_sched.connectors.transport import Arrivals, Health, Status, Transport
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


class ArenaConnector(TransportConnector):
    """Connector over `vllm_omni_sched.connectors.arena`.

    Args:
        config: ``extra`` of the connector: fields of `ArenaOptions`.

    Raises:
        ConfigError: an option is unknown or cannot work; the message names it.
        RendezvousError: the arena's directory cannot be used.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        options = read_extra(ArenaOptions, config)
        check_meeting(options, type(self).__name__)
        super().__init__(config, lambda: ArenaTransport(options), options.put_timeout_seconds)


def check_meeting(options: ArenaOptions, connector: str) -> None:
    """Check that stages can find each other, and remove files left by killed runs.

    Raises:
        ConfigError: the stages would not find each other.
    """
    if options.arena is None and ARENA_VARIABLE not in os.environ:
        raise ConfigError(
            f"{connector}: {ARENA_VARIABLE} is not set; vLLM-Omni with the plugin sets it in its stages. Set "
            "the option `arena` to one name for all stages of this pipeline"
        )
    sweep(Path(options.directory) / f"vllm-omni-sched-{os.geteuid()}")


REPLICA_VARIABLE = "VLLM_OMNI_REPLICA_ID"


class OmniAutoConnector(TransportConnector):
    """Connector over `vllm_omni_sched.connectors.routing`.

    Args:
        config: ``extra`` of the connector: fields of `AutoOptions`.

    Raises:
        ConfigError: an option is unknown or cannot work; the message names it.
        RendezvousError: the arena's directory cannot be used.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        options = read_extra(AutoOptions, config)
        if options.arena is not None:
            check_meeting(options.arena, type(self).__name__)
        engine = {key: value for key, value in config.items() if key in ENGINES}
        more = _more(options, engine)
        stage, replica = _served(engine)
        super().__init__(config, lambda: auto_transport(options, more, stage, replica), options.put_timeout_seconds)


def _served(engine: dict[str, Any]) -> tuple[str | None, int]:
    """Return stage and replica of this process as far as vLLM-Omni states them."""
    stage, replica = engine.get("stage_id", -1), engine.get("replica_id", os.environ.get(REPLICA_VARIABLE, 0))
    return None if stage in (None, -1) else str(stage), int(replica or 0)


def _more(options: AutoOptions, engine: dict[str, Any]) -> MoreWays | None:
    if not options.foreign:
        return None
    from vllm_omni_sched.omni.foreign_transport import foreign_ways  # imported only if needed, with its requirements

    return lambda ours: foreign_ways(options.foreign, ours, engine)


class CudaIpcConnector(TransportConnector):
    """Connector over `vllm_omni_sched.connectors.cuda_ipc`; without a CUDA device it warns and is an ArenaConnector.

    Args:
        config: ``extra`` of the connector: fields of `CudaIpcConnectorOptions`.

    Raises:
        ConfigError: an option is unknown or cannot work; the message names it.
        RendezvousError: the arena's directory cannot be used.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        options = read_extra(CudaIpcConnectorOptions, config)
        check_meeting(options.arena, type(self).__name__)
        super().__init__(config, lambda: CudaIpcTransport(options, options.arena), options.arena.put_timeout_seconds)


class MooncakePoolConnector(TransportConnector):
    """Connector over `vllm_omni_sched.connectors.mooncake`.

    Args:
        config: ``extra`` of the connector: fields of `MooncakeOptions`.

    Raises:
        ConfigError: an option is unknown or cannot work, or the library is not installed; the message names it.
        RendezvousError: the master cannot be reached.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        options = read_extra(MooncakeOptions, config)
        super().__init__(config, lambda: MooncakeTransport(options), options.put_timeout_seconds)
