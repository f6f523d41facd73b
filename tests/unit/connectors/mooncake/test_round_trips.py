"""How often the library is called for a message, by counting: most of its calls ask the master once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from tests.support.mooncake import Deployment, received
from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.framing import make_message
from vllm_omni_sched.connectors.mooncake import MooncakeTransport

pytestmark = pytest.mark.usefixtures("inside")
EDGE = Edge("0", "1")


class Counted:
    """A client of the library whose calls are counted."""

    def __init__(self, client: Any) -> None:
        self._client, self.calls = client, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self._client, name)


def counted(path: MooncakeTransport) -> Counter[str]:
    """Of calls from now on, when nothing but `get` and `put` asks the master."""
    path._closed = True
    path._wake.set()
    path._keeper.join()
    path._closed = False
    client = path._store._client = Counted(path._store._client)
    return client.calls


def put(path: MooncakeTransport, key: str) -> None:
    path.put(make_message(EDGE, key, np.zeros(100_000, np.uint8)))


def test_a_message_is_one_call_to_send_and_two_to_get(shared: Deployment) -> None:
    sender, receiver = shared.path(), shared.path()
    put(sender, "first")  # after which the size of the next is known
    assert len(received(receiver, EDGE, "first")) == 100_000
    sends, gets = counted(sender), counted(receiver)
    for i in range(20):
        put(sender, f"m{i}")
        assert receiver.get(EDGE, f"m{i}") is not None
    assert sends == {"upsert_from": 20}
    assert gets == {"get_into": 20, "remove": 20}


def test_what_is_waited_for_is_looked_for_in_one_call_for_all(shared: Deployment) -> None:
    sender, receiver = shared.path(), shared.path(poll_seconds=3600)
    put(sender, "first")
    assert len(received(receiver, EDGE, "first")) == 100_000
    gets = counted(receiver)
    keys = [f"waited{i}" for i in range(20)]
    for key in keys:
        assert receiver.get(EDGE, key) is None
    assert gets == {"get_into": 20}  # the first look at each is where it most often lies
    for key in keys:
        put(sender, key)
    gets.clear()
    with receiver._inbox._lock:
        for wanted in receiver._inbox._wanted.values():
            wanted.next_at = 0.0  # it is time to look again
    for key in keys:
        assert receiver.get(EDGE, key) is not None
    assert gets == {"batch_is_exist": 1, "get_into": 20, "remove": 20}
