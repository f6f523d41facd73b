"""Clients of the Mooncake library that are used again, for tests that open many."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from vllm_omni_sched.connectors.mooncake.store import load_library


class ReusedClients:
    """Stands in for the library and gives out closed clients again, to those that set them up with the same arguments:
    the size of a segment is one. To close a client takes the library a second, in which no other thread of the
    interpreter runs."""

    def __init__(self) -> None:
        self.ReplicateConfig = load_library().ReplicateConfig
        self._idle: defaultdict[tuple[Any, ...], list[Any]] = defaultdict(list)

    def __call__(self) -> ReusedClients:
        return self

    def MooncakeDistributedStore(self) -> Any:
        return _Client(self._idle)

    def clear(self, namespace: str) -> None:
        """Remove what is left of a namespace, when all its clients are closed."""
        if client := next(self._all(), None):
            client.remove_by_regex(f"^{namespace}/.*", True)

    def close(self) -> None:
        """Close the clients for good."""
        for client in self._all():
            client.close()

    def _all(self) -> Iterator[Any]:
        return (client for clients in self._idle.values() for client in clients)


class _Client:
    def __init__(self, idle: Mapping[tuple[Any, ...], list[Any]]) -> None:
        self._every_idle, self._registered = idle, list[int]()
        self._client: Any = None

    def setup(self, *arguments: Any) -> int:
        self._idle = self._every_idle[arguments]
        if self._idle:
            self._client = self._idle.pop()
            return 0
        self._client = load_library().MooncakeDistributedStore()
        return int(self._client.setup(*arguments))

    def register_buffer(self, address: int, nbytes: int) -> int:
        assert self._client is not None
        self._registered.append(address)
        return int(self._client.register_buffer(address, nbytes))

    def close(self) -> int:
        assert self._client is not None
        for address in self._registered:
            self._client.unregister_buffer(address)
        self._idle.append(self._client)
        return 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)
