"""Define a path within this process that a test can make refuse, or delay."""

from __future__ import annotations

from vllm_omni_sched.config.errors import ConnectorError, TransportClosedError
from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.framing import Arrival, Message
from vllm_omni_sched.connectors.transport import Health, Status, Transport


class ScriptedTransport(Transport):
    """Holds messages in a dict; `fails` is raised by `put`, `seconds` is what the injected clock goes on by."""

    def __init__(self, name: str, clock: list[float]) -> None:
        self.name, self._clock = name, clock
        self.fails: ConnectorError | None = None
        self.put_seconds = self.get_seconds = 0.0
        self.messages: dict[tuple[Edge, str], bytearray] = {}
        self.puts: list[tuple[str, float | None]] = []
        self.closed = False

    def put(self, message: Message, deadline: float | None = None) -> int:
        if self.closed:
            raise TransportClosedError(self.name)
        self.puts.append((message.key, deadline))
        if self.fails is not None:
            raise self.fails
        self._clock[0] += self.put_seconds
        self.messages[message.edge, message.key] = message.to_buffer()
        return message.nbytes

    def get(self, edge: Edge, key: str) -> Arrival | None:
        found = self.messages.pop((edge, key), None)
        if found is None:
            return None
        self._clock[0] += self.get_seconds
        return Arrival(found)

    def discard(self, key: str) -> int:
        found = [name for name in self.messages if name[1] == key]
        return len([self.messages.pop(name) for name in found])

    def reap(self, limit: int | None = None) -> int:
        return 0

    def health(self) -> Health:
        return Health(Status.SICK if self.fails else Status.HEALTHY, str(self.fails or ""), {})

    def close(self) -> None:
        self.closed = True
