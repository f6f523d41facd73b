"""Sender or receiver of `benchmarks.mooncake`, in a process of its own, which talks to one master.

vLLM-Omni's MooncakeStoreConnector cannot start with this release of the library, so its calls are replayed: serialize
and `put`, then `get` and deserialize. To its favour, what was got is removed outside of the time, which it never does,
and nothing is asked for before it is there, so that its sleep of 50 ms between two looks costs it nothing.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
import vllm_omni
from vllm_omni.distributed.omni_connectors.utils.serialization import OmniSerializer

from benchmarks.harness.child import emit
from benchmarks.mooncake import LOCAL_BUFFER, OURS, SEGMENT
from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.framing import make_message
from vllm_omni_sched.connectors.mooncake import MooncakeOptions, MooncakeTransport

EDGE = Edge("0", "1")


def main() -> None:
    side, master = sys.argv[1:]
    peer: Any = Ours(master) if side == OURS else Theirs(master)
    payloads: dict[int, Any] = {}
    emit("ready", vllm_omni=vllm_omni.__version__)
    for line in sys.stdin:
        request = json.loads(line)
        key, nbytes = request["key"], request["nbytes"]
        if request["do"] == "put":
            payload = payloads.setdefault(nbytes, {"hidden_states": torch.randn(nbytes // 4)})
            began = time.perf_counter()
            peer.put(key, payload)
            took = time.perf_counter() - began
        else:
            began = time.perf_counter()
            got = peer.get(key)
            took = time.perf_counter() - began
            assert got["hidden_states"].numel() == nbytes // 4
            del got
            peer.forget(key)
        emit("done", seconds=took)
    peer.close()


class Ours:
    def __init__(self, master: str) -> None:
        self._path = MooncakeTransport(
            MooncakeOptions(master=master, proto="tcp", segment=SEGMENT, localbuf=LOCAL_BUFFER, poll_seconds=1e-3)
        )
        self.close = self._path.close

    def put(self, key: str, payload: Any) -> None:
        self._path.put(make_message(EDGE, key, payload))

    def get(self, key: str) -> Any:
        while (arrival := self._path.get(EDGE, key)) is None:
            pass
        return arrival.open()

    def forget(self, key: str) -> None:
        """Do nothing: the message was removed when it was received."""


class Theirs:
    """The calls of `MooncakeStoreConnector`."""

    def __init__(self, master: str) -> None:
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig

        self._store, self._config = MooncakeDistributedStore(), ReplicateConfig()
        code = self._store.setup("127.0.0.1", "P2PHANDSHAKE", SEGMENT, LOCAL_BUFFER, "tcp", "", master)
        assert code == 0, f"Mooncake could not be set up (code {code})"
        self.close = self._store.close

    def put(self, key: str, payload: Any) -> None:
        assert self._store.put(key, OmniSerializer.serialize(payload), self._config) == 0

    def get(self, key: str) -> Any:
        return OmniSerializer.deserialize(self._store.get(key))

    def forget(self, key: str) -> None:
        self._store.remove(key, True)


if __name__ == "__main__":
    main()
