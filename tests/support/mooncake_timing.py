"""Ours against the calls of vLLM-Omni's MooncakeStoreConnector, with the same library, master and payloads.

That connector cannot start with this release of the library, so its calls are replayed: serialize and `put`, then `get`
and deserialize. To its favour, what was got is removed outside of the time, which it never does, and nothing is asked
for before it is there, so that its sleep of 50 ms between two looks costs it nothing.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any, NamedTuple

import numpy as np
import torch

from tests.support.mooncake import Child, Deployment
from vllm_omni_sched.connectors.base import Edge
from vllm_omni_sched.connectors.framing import make_message
from vllm_omni_sched.connectors.mooncake import MooncakeOptions, MooncakePath

EDGE = Edge("0", "1")
SEGMENT, LOCAL_BUFFER = 512 << 20, 256 << 20
WARM_UP = 5
SCRIPT = "from tests.support.mooncake_timing import send, receive\n"


class Timing(NamedTuple):
    """Milliseconds of put and get together, payload in to payload out."""

    nbytes: int
    ours_p50: float
    ours_p99: float
    theirs_p50: float
    theirs_p99: float

    @property
    def times_faster(self) -> float:
        return self.theirs_p50 / self.ours_p50


def compare(nbytes: int, rounds: int = 100) -> Timing:
    """One tensor of so many bytes, from process to process, ours and theirs in turns."""
    with Deployment() as deployment, deployment.inside():
        options = deployment.options(segment=SEGMENT, localbuf=LOCAL_BUFFER)
        sender = Child(f"{SCRIPT}send(path, {nbytes}, say)", options.model_dump_json())
        receiver = Child(f"{SCRIPT}receive(path, say)", options.model_dump_json())
        try:
            took: dict[str, list[float]] = {"ours": [], "theirs": []}
            assert (sender.heard(), receiver.heard()) == ("ready", "ready")
            for number in range(rounds + WARM_UP):
                for side, seconds in took.items():
                    sender.tell(f"{side} {number}")
                    put = float(sender.heard())
                    receiver.tell(f"{side} {number}")
                    got = float(receiver.heard())
                    if number >= WARM_UP:
                        seconds.append(put + got)
        finally:
            sender.close()
            receiver.close()
    ours, theirs = (np.percentile(seconds, (50, 99)) * 1e3 for seconds in took.values())
    return Timing(nbytes, *(round(float(value), 3) for value in (*ours, *theirs)))


class Theirs:
    """The calls of `MooncakeStoreConnector`."""

    def __init__(self, master: str) -> None:
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig
        from vllm_omni.distributed.omni_connectors.utils.serialization import OmniSerializer

        self._serializer = OmniSerializer
        self.store = MooncakeDistributedStore()
        arguments = ("127.0.0.1", "P2PHANDSHAKE", SEGMENT, LOCAL_BUFFER, "tcp", "", master)
        assert self.store.setup(*arguments) == 0
        self._config = ReplicateConfig()

    def put(self, key: str, payload: Any) -> None:
        assert self.store.put(key, self._serializer.serialize(payload), self._config) == 0

    def get(self, key: str) -> Any:
        return self._serializer.deserialize(self.store.get(key))


def send(path: MooncakePath, nbytes: int, say: Any) -> None:
    """One end: puts what it is told to, and says how long that took."""
    theirs = Theirs(master_of_this_child())
    payload = {"hidden_states": torch.randn(nbytes // 4)}
    say("ready")
    for line in sys.stdin:
        side, number = line.split()
        start = time.perf_counter()
        if side == "ours":
            path.put(make_message(EDGE, number, payload))
        else:
            theirs.put(number, payload)
        say(time.perf_counter() - start)


def receive(path: MooncakePath, say: Any) -> None:
    """The other end."""
    theirs = Theirs(master_of_this_child())
    say("ready")
    for line in sys.stdin:
        side, number = line.split()
        start = time.perf_counter()
        if side == "ours":
            while (arrival := path.get(EDGE, number)) is None:
                pass
            got = arrival.open()
        else:
            got = theirs.get(number)
        took = time.perf_counter() - start
        assert got["hidden_states"].numel()
        del got
        if side == "theirs":
            theirs.store.remove(number, True)
        say(took)


def master_of_this_child() -> str:
    return MooncakeOptions.model_validate_json(sys.argv[1]).master


if __name__ == "__main__":
    for size in (int(word) for word in sys.argv[1:] or ("1048576", "16777216", "67108864")):
        timing = compare(size)
        print(json.dumps({**timing._asdict(), "times_faster": round(timing.times_faster, 2)}), flush=True)
