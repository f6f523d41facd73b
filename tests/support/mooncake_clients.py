"""Clients of the Mooncake library that are used again, for tests that open many."""

from __future__ import annotations

from typing import Any

from vllm_omni_sched.connectors.mooncake.store import load_library


class ReusedClients:
    """Stands in for the library and gives out closed clients again. To close one takes the library a second, in
    which no other thread of the interpreter runs."""

    def __init__(self) -> None:
        self.ReplicateConfig = load_library().ReplicateConfig
        self._idle: list[Any] = []

    def __call__(self) -> ReusedClients:
        return self

    def MooncakeDistributedStore(self) -> Any:
        return _Client(self._idle)

    def clear(self, namespace: str) -> None:
        """Remove what is left of a namespace, when all its clients are closed."""
        if self._idle:
            self._idle[0].remove_by_regex(f"^{namespace}/.*", True)

    def close(self) -> None:
        """Close the clients for good."""
        for client in self._idle:
            client.close()


class _Client:
    def __init__(self, idle: list[Any]) -> None:
        self._idle, self._registered = idle, list[int]()
        self._client = idle.pop() if idle else None

    def setup(self, *arguments: Any) -> int:
        if self._client is not None:
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
