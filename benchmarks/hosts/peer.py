"""Sender or receiver of `benchmarks.hosts`, in a process of its own, in the network of its host.

vLLM-Omni's MooncakeStoreConnector cannot start with this release of the library, so its calls are replayed: serialize
and `put`, then `get` and deserialize. To its favour, what was got is removed outside of the time, which it never does,
and nothing is asked for before it is there, so that its sleep of 50 ms between two looks costs it nothing.
"""

from __future__ import annotations

import json
import sys
import time
import zlib
from typing import Any

import numpy as np
import torch
import vllm_omni
from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory
from vllm_omni.distributed.omni_connectors.utils.config import ConnectorSpec
from vllm_omni.distributed.omni_connectors.utils.serialization import OmniSerializer

from benchmarks.harness.child import emit
from benchmarks.hosts import ENGINE, HIDDEN, LOCAL_BUFFER, PACKED, POOL, SEGMENT, STORE
from vllm_omni_sched.connector_names import register_names

WIDTH = 2048
PATIENCE_SECONDS = 60.0
Metadata = dict[str, Any] | None
Edge = tuple[str, str]


def main() -> None:
    side, role, host, master = sys.argv[1:]
    peer = peer_of(side, role, host, master)
    payloads: dict[tuple[str, int], Any] = {}
    emit("ready", vllm_omni=vllm_omni.__version__)
    for line in sys.stdin:
        request = json.loads(line)
        key, edge, what = request["key"], ("0", request["stage"]), (request["kind_of"], request["nbytes"])
        if request["do"] == "put":
            payload = payloads[what] = payloads.get(what) or payload_of(*what)
            began = time.perf_counter()
            told = peer.put(edge, key, payload)
            emit("done", seconds=time.perf_counter() - began, told=told, checksum=checksum(payload))
        else:
            began = time.perf_counter()
            got = peer.get(edge, key, request["told"])
            took = time.perf_counter() - began
            found = checksum(got)
            del got
            peer.forget(key)
            emit("done", seconds=took, checksum=found)


def payload_of(kind: str, nbytes: int) -> dict[str, Any]:
    """Return hidden states as a decoder leaves them, with channels of widely different size; or token ids by Zipf."""
    rng = np.random.default_rng(0)
    if kind == HIDDEN:
        scale = np.exp(rng.normal(0.0, 1.0, WIDTH))
        states = rng.standard_normal((nbytes // 2 // WIDTH, WIDTH), np.float32) * scale.astype(np.float32)
        return {"hidden_states": torch.from_numpy(states).to(torch.bfloat16)}
    return {"ids": torch.from_numpy(np.minimum(rng.zipf(1.1, nbytes // 8), 151_935).astype(np.int64))}


def checksum(payload: dict[str, Any]) -> int:
    (tensor,) = payload.values()
    return zlib.crc32(tensor.contiguous().view(torch.uint8).numpy())


def peer_of(side: str, role: str, host: str, master: str) -> Any:
    """Return what puts and gets messages as one side does."""
    if side == STORE:
        return StoreCalls(host, master)
    if side == ENGINE:
        extra = {"host": host, "protocol": "tcp", "memory_pool_device": "cpu:0", "memory_pool_size": POOL}
        return OfVllmOmni(ENGINE, {**extra, "zmq_port": 50200, "role": role})
    register_names()
    mooncake = {"host": host, "master": master, "proto": "tcp", "segment": SEGMENT, "localbuf": LOCAL_BUFFER}
    mooncake |= {"slowest_bytes_per_second": 1 << 20, "poll_seconds": 1e-3}
    compression = {"mode": "auto" if side == PACKED else "off"}
    return Ours("OmniAutoConnector", {"arena": None, "mooncake": mooncake, "compression": compression})


class OfVllmOmni:
    """A connector from vLLM-Omni's factory, with its calls."""

    def __init__(self, name: str, extra: dict[str, Any]) -> None:
        self.connector = OmniConnectorFactory.create_connector(ConnectorSpec(name, extra))

    def put(self, edge: Edge, key: str, payload: Any) -> Metadata:
        sent, _, told = self.connector.put(*edge, key, payload)
        assert sent, "the connector refused a message"
        return told if isinstance(told, dict) else None

    def get(self, edge: Edge, key: str, told: Metadata) -> Any:
        found = self.connector.get(*edge, key, told)
        assert found is not None, "the connector lost a message"
        return found[0]

    def forget(self, key: str) -> None:
        """Do nothing: the message is gone when it was received."""


class Ours(OfVllmOmni):
    """The connector of this package."""

    def get(self, edge: Edge, key: str, told: Metadata) -> Any:
        found = self.connector.get_with_deadline(*edge, key, deadline=time.monotonic() + PATIENCE_SECONDS)
        assert found is not None, "the connector lost a message"
        return found[0]


class StoreCalls:
    """The calls of `MooncakeStoreConnector`."""

    def __init__(self, host: str, master: str) -> None:
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig

        self._store, self._config = MooncakeDistributedStore(), ReplicateConfig()
        code = self._store.setup(host, "P2PHANDSHAKE", SEGMENT, LOCAL_BUFFER, "tcp", "", master)
        assert code == 0, f"Mooncake could not be set up (code {code})"

    def put(self, edge: Edge, key: str, payload: Any) -> Metadata:
        assert self._store.put(key, OmniSerializer.serialize(payload), self._config) == 0
        return None

    def get(self, edge: Edge, key: str, told: Metadata) -> Any:
        return OmniSerializer.deserialize(self._store.get(key))

    def forget(self, key: str) -> None:
        self._store.remove(key, True)


if __name__ == "__main__":
    main()
