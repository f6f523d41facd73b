"""The real receiving thread of vLLM-Omni's transfer adapter, over our connectors and over its own."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from vllm_omni.distributed.omni_connectors.connectors.shm_connector import SharedMemoryConnector
from vllm_omni.distributed.omni_connectors.transfer_adapter.base import OmniTransferAdapterBase

from tests.support.arena import LONG, place
from vllm_omni_sched.connectors import receive_queue
from vllm_omni_sched.connectors.receive_queue import ReceiveCondition, ReceiveQueue
from vllm_omni_sched.omni.connector import ArenaConnector
from vllm_omni_sched.omni.receiving import hook

pytestmark = pytest.mark.omni

EDGE = ("0", "1")


class Waiting(NamedTuple):
    """An entry of the adapter's queue."""

    request_id: str


class Adapter(OmniTransferAdapterBase):  # type: ignore[misc]
    """vLLM-Omni's loop; a poll is one `get`."""

    def __init__(self, connector: Any) -> None:
        self.connector = connector
        self._receiver_state_lock = threading.Lock()
        self.polls: Counter[str] = Counter()
        self.got: dict[str, Any] = {}
        self.cancelled: set[str] = set()
        self.done = threading.Event()
        self.expected = -1
        super().__init__(None)

    def _poll_single_request(self, entry: Waiting) -> bool:
        self.polls[entry.request_id] += 1
        if entry.request_id in self.cancelled:
            self.done.set()
            return True
        found = self.connector.get(*EDGE, entry.request_id)
        if found is None:
            return False
        self.got[entry.request_id] = found[0]
        if len(self.got) == self.expected:
            self.done.set()
        return True

    def load_async(self, request_id: str) -> None:
        with self._receiver_state_lock:
            self._pending_load_reqs.append(Waiting(request_id))
        with self._recv_cond:
            self._recv_cond.notify()

    def end(self) -> None:
        self.shutdown()
        self.recv_thread.join(LONG)
        self.save_thread.join(LONG)
        assert not self.recv_thread.is_alive()


@pytest.fixture(autouse=True)
def hooked() -> None:
    hook()
    hook()


@pytest.fixture
def connectors() -> Iterator[tuple[ArenaConnector, ArenaConnector]]:
    pool = {"initial_bytes": 1 << 20, "max_bytes": 1 << 22}
    with place() as root:
        extra = {"directory": root, "arena": "a", "text": pool, "image": pool, "audio": pool}
        sender, receiver = (ArenaConnector({**extra, "stage_id": stage}) for stage in (0, 1))
        yield sender, receiver
        sender.close()
        receiver.close()


def test_64_requests_are_polled_twice_each_however_long_they_wait(
    connectors: tuple[ArenaConnector, ArenaConnector], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receive_queue, "POLL_AGAIN", 10 * LONG)
    sender, receiver = connectors
    adapter = Adapter(receiver)
    names = [f"r{number}" for number in range(64)]
    adapter.expected = len(names)
    for name in names:
        adapter.load_async(name)
    for name in names:
        assert sender.put(*EDGE, name, {"name": name})[0]
    assert adapter.done.wait(LONG)
    assert isinstance(adapter._pending_load_reqs, ReceiveQueue)
    assert isinstance(adapter._recv_cond, ReceiveCondition)
    adapter.end()
    assert adapter.got == {name: {"name": name} for name in names}
    assert max(adapter.polls.values()) <= 2


def test_messages_that_came_before_their_requests_are_received(
    connectors: tuple[ArenaConnector, ArenaConnector],
) -> None:
    sender, receiver = connectors
    adapter = Adapter(receiver)
    adapter.expected = 8
    for number in range(8):
        assert sender.put(*EDGE, f"r{number}", {"n": number})[0]
    for number in range(8):
        adapter.load_async(f"r{number}")
    assert adapter.done.wait(LONG)
    adapter.end()
    assert set(adapter.polls.values()) == {1}


def test_a_cancelled_request_leaves_the_queue(connectors: tuple[ArenaConnector, ArenaConnector]) -> None:
    adapter = Adapter(connectors[1])
    adapter.load_async("r")
    adapter.cancelled.add("r")
    assert adapter.done.wait(LONG)
    adapter.end()
    assert not adapter._pending_load_reqs


def test_an_adapter_with_another_connector_is_as_vllm_omni_made_it() -> None:
    adapter = Adapter(SharedMemoryConnector({"stage_id": 1}))
    with adapter._recv_cond:
        adapter._recv_cond.notify()
    assert type(adapter._pending_load_reqs) is deque
    assert type(adapter._recv_cond) is threading.Condition
    adapter.end()


def test_an_adapter_of_another_shape_is_left_as_it_is(
    connectors: tuple[ArenaConnector, ArenaConnector], caplog: pytest.LogCaptureFixture
) -> None:
    from vllm_omni_sched.omni.receiving import prepare

    class Other:
        connector, _pending_load_reqs = connectors[1], dict[str, Any]()

    with caplog.at_level("WARNING"):
        prepare(Other)
    assert Other._pending_load_reqs == {}
