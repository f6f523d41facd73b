"""Use vLLM-Omni's own connectors as transports, which `OmniAutoConnector` chooses for suitable messages."""

from __future__ import annotations

import hashlib
import inspect
import socket
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory
from vllm_omni.distributed.omni_connectors.utils.config import TRANSFER_ENGINE_CONNECTOR_NAMES, ConnectorSpec

from vllm_omni_sched.config.errors import (
    ConfigError,
    CorruptMessageError,
    NoRoomError,
    RendezvousError,
    TransportClosedError,
)
from vllm_omni_sched.connector_names import CONNECTORS
from vllm_omni_sched.connectors.auto import ForeignOptions
from vllm_omni_sched.connectors.edge import Edge, name_of
from vllm_omni_sched.connectors.framing import Arrival, Message, make_message
from vllm_omni_sched.connectors.routing import Way
from vllm_omni_sched.connectors.transport import Health, Status, Transport
from vllm_omni_sched.logs import get_logger

logger = get_logger(__name__)

MAIL = "omni-sched/mail/"
REMEMBERED = 1 << 14
"""Largest number of messages, sent or to be fetched, that are remembered."""
CLOSING_SECONDS = 2.0
FAILURES = (RuntimeError, OSError, ValueError)
"""Exceptions that connectors raise instead of returning a failure."""


def foreign_ways(options: Mapping[str, ForeignOptions], ours: Sequence[Way], engine: Mapping[str, Any]) -> list[Way]:
    """Return one transport for each connector that the options name.

    Args:
        options: options by the name of the transport.
        ours: transports that can carry metadata (mail).
        engine: the keys that vLLM-Omni adds to ``extra``, which connectors read, too.

    Raises:
        ConfigError: a connector cannot be made; the message names it and repeats its error.
    """
    made: list[Way] = []
    try:
        for name, wanted in options.items():
            mail = _mail(name, wanted, ours)
            checksum = wanted.distance > 0 if wanted.checksum is None else wanted.checksum
            made.append(Way(ForeignTransport(name, _connector(name, wanted, engine), mail, checksum), wanted.distance))
    except BaseException:
        for way in made:
            way.transport.close()
        raise
    return made


class ForeignTransport(Transport):
    """Transport of messages through a connector of vLLM-Omni.

    1. A message is sent as one flat payload, under a key made of edge and key: the same key on two edges
       names two messages, and any key is valid.
    2. If its `get` needs the return value of its `put`, that is sent ahead as a small message by another transport.
    3. The fate of a message is unknown: `discard` also counts messages that may have been received, nothing expires,
       and messages that were not received when the connector closes may be lost.
    4. Its calls have no deadlines but the connector's own.

    Args:
        connector: an OmniConnector; it is closed with the transport.
        mail: a transport that reaches every receiver, for metadata; None: `get` works by key alone.
        checksum: send checksums of the buffers; received messages are checked if they have them.
    """

    def __init__(self, name: str, connector: Any, mail: Transport | None = None, checksum: bool = True) -> None:
        self.name, self._connector, self._mail, self._checksum = name, connector, mail, checksum
        self._lock = threading.Lock()
        self._sent: OrderedDict[tuple[str, Edge], None] = OrderedDict()
        self._to_fetch: OrderedDict[bytes, Any] = OrderedDict()  # by name: metadata of messages not fetched yet
        self._back: deque[Any] = deque()  # buffers of the connector that are no longer used
        self._counts = {"put": 0, "put_bytes": 0, "got": 0, "got_bytes": 0, "refused": 0, "discarded": 0, "corrupt": 0}
        self._refusal = ""
        self._closed = False
        cleanup = inspect.signature(connector.cleanup).parameters
        self._cleanup_by_edge = {"from_stage", "to_stage"} <= cleanup.keys()

    def put(self, message: Message, deadline: float | None = None) -> int:
        self._check_open("put")
        edge, key = message.edge, _key(message.name)
        flat = message.to_buffer(self._checksum)
        payload = torch.frombuffer(flat, dtype=torch.uint8) if self._connector.supports_raw_data else bytes(flat)
        why = "see its log"
        try:
            sent, _, metadata = self._connector.put(edge.source, edge.target, key, payload)
        except FAILURES as error:
            sent, metadata, why = False, None, str(error)
        if sent and self._mail is not None:
            try:
                self._mail.put(make_message(edge, self._mail_key(message.key), metadata), deadline)
            except BaseException:
                self._cleanup(edge, key)
                raise
        if not sent:
            connector = type(self._connector).__name__
            self._refusal = f"{connector} refused {message.nbytes} bytes on edge {edge}: {why}"
            self._count(refused=1)
            raise NoRoomError(self._refusal)
        self._refusal = ""
        with self._lock:
            self._sent[message.key, edge] = None
            if len(self._sent) > REMEMBERED:
                self._sent.popitem(last=False)
        self._count(put=1, put_bytes=message.nbytes)
        return message.nbytes

    def get(self, edge: Edge, key: str) -> Arrival | None:
        self._check_open("get")
        self._release_back()
        name, metadata = name_of(edge, key), None
        if self._mail is not None:
            metadata = self._where(edge, key, name)
            if metadata is None:
                return None
        try:
            found = self._connector.get(edge.source, edge.target, _key(name), metadata)
        except FAILURES as error:
            raise RendezvousError(
                f"transport {self.name} failed to get message {key[:80]!r} of edge {edge}: {error}"
            ) from error
        if found is None:
            return None
        with self._lock:
            self._to_fetch.pop(name, None)
        try:
            arrival = Arrival(self._array(found[0]), name)
        except CorruptMessageError:
            self._count(corrupt=1)
            raise
        self._count(got=1, got_bytes=arrival.nbytes)
        return arrival

    def discard(self, key: str) -> int:
        if self._closed:
            return 0
        with self._lock:
            edges = [edge for one, edge in self._sent if one == key]
            for edge in edges:
                del self._sent[key, edge]
        for edge in edges:
            if self._mail is not None:
                self._mail.discard(self._mail_key(key))
            self._cleanup(edge, _key(name_of(edge, key)))
        self._count(discarded=len(edges))
        return len(edges)

    def reap(self, limit: int | None = None) -> int:
        if not self._closed:
            self._release_back()
            self._connector.reap_consumed()
        return 0

    def health(self) -> Health:
        with self._lock:
            facts: dict[str, Any] = {"connector": type(self._connector).__name__, **self._counts}
        if self._closed:
            return Health(Status.CLOSED, "it was closed", facts)
        said = self._connector.health()
        facts["says"] = {key: value for key, value in said.items() if isinstance(value, (str, int, float))}
        reason = "" if said.get("status") == "healthy" else str(said.get("error") or said.get("status"))
        reason = reason or self._refusal
        return Health(Status.SICK if reason else Status.HEALTHY, reason, facts)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._release_back()
        # MooncakeTransferEngineConnector waits for sockets of its own threads that are never closed
        closing = threading.Thread(target=self._connector.close, name=f"close-{self.name}", daemon=True)
        closing.start()
        closing.join(CLOSING_SECONDS)
        if closing.is_alive():
            logger.warning(
                "transport %s: close() of its connector did not return in time; continuing without it", self.name
            )

    def _where(self, edge: Edge, key: str, name: bytes) -> Any:
        """Return the metadata that `put` returned for a message; None if nothing was put yet."""
        assert self._mail is not None
        arrival = self._mail.get(edge, self._mail_key(key))
        with self._lock:
            if arrival is not None:  # a newer one replaces an earlier one that was not fetched
                self._to_fetch[name] = arrival.open()
                if len(self._to_fetch) > REMEMBERED:
                    self._to_fetch.popitem(last=False)
            return self._to_fetch.get(name)

    def _mail_key(self, key: str) -> str:
        return f"{MAIL}{self.name}/{key}"

    def _array(self, payload: Any) -> Any:
        """Return the bytes of a message as a flat array; the connector's buffer is released when no view is left."""
        if isinstance(payload, (bytes, bytearray)):
            return np.frombuffer(bytearray(payload), np.uint8)
        tensor = payload if isinstance(payload, torch.Tensor) else getattr(payload, "tensor", None)
        if not isinstance(tensor, torch.Tensor):
            raise CorruptMessageError(
                f"{type(self._connector).__name__} returned a {type(payload).__name__} instead of bytes"
            )
        if tensor.device.type != "cpu":
            return tensor.cpu().numpy()
        array = tensor.numpy()
        if tensor is not payload:
            weakref.finalize(array, self._back.append, payload).atexit = False
        return array

    def _release_back(self) -> None:
        """Release unused buffers before the connector is called, so that an error here loses no message."""
        while self._back:
            try:
                buffer = self._back.popleft()
            except IndexError:  # another thread was quicker
                return
            buffer.release()

    def _cleanup(self, edge: Edge, key: str) -> None:
        if self._cleanup_by_edge:
            self._connector.cleanup(key, edge.source, edge.target)
        else:
            self._connector.cleanup(key)

    def _count(self, **more: int) -> None:
        with self._lock:
            for name, count in more.items():
                self._counts[name] += count

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise TransportClosedError(f"transport {self.name} was closed before this {what}")


def _key(name: bytes) -> str:
    return f"omni-sched-{hashlib.blake2b(name, digest_size=16).hexdigest()}"


def _mail(name: str, wanted: ForeignOptions, ours: Sequence[Way]) -> Transport | None:
    if wanted.name not in TRANSFER_ENGINE_CONNECTOR_NAMES and wanted.mail is None:
        return None
    ways = {way.transport.name: way for way in ours}
    if not ways or (wanted.mail is not None and wanted.mail not in ways):
        raise ConfigError(
            f"option `foreign`: receivers of transport {name!r} ({wanted.name}) need the location of messages, sent by "
            f"`mail: {wanted.mail}`; available are {sorted(ways)}: set `arena` or `mooncake`"
        )
    if wanted.mail is not None:
        return ways[wanted.mail].transport
    return max(ways.values(), key=lambda way: way.distance).transport


def _connector(name: str, wanted: ForeignOptions, engine: Mapping[str, Any]) -> Any:
    known = [one for one in OmniConnectorFactory.list_registered_connectors() if one not in CONNECTORS]
    if wanted.name not in known:
        raise ConfigError(f"option `foreign`: transport {name!r} names {wanted.name!r}; vLLM-Omni has {sorted(known)}")
    extra = {key: value for key, value in engine.items() if key != "outgoing"} | wanted.extra
    if "outgoing" in engine and "role" not in wanted.extra:
        extra.pop("role", None)  # it also sends
    if wanted.name in TRANSFER_ENGINE_CONNECTOR_NAMES and extra.get("role") != "receiver":
        extra.setdefault("zmq_port", _free_port())  # each stage makes several; receivers learn the port by mail
    try:
        return OmniConnectorFactory.create_connector(ConnectorSpec(wanted.name, extra))
    except (ValueError, ImportError, RuntimeError, OSError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"option `foreign`: transport {name!r} cannot be made: {error}. Install the requirements of {wanted.name} "
            f"{INSTALL.get(wanted.name, '(see its documentation in vLLM-Omni)')}, or remove the transport"
        ) from error


INSTALL = {
    "NixlConnector": "(`pip install nixl`)",
    "MooncakeTransferEngineConnector": "(`pip install mooncake-transfer-engine`)",
    "MooncakeStoreConnector": "(a release of mooncake-transfer-engine that it can start with)",
    "MoriTransferEngineConnector": "(`pip install mori`)",
    "YuanrongConnector": "(`pip install openyuanrong-datasystem`)",
}


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("", 0))
        return int(one.getsockname()[1])
