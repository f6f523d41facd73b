"""What a path makes of vLLM-Omni's connectors, with connectors that misbehave."""

from __future__ import annotations

import gc
import threading
from collections import deque
from typing import Any

import pytest
import torch

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from tests.contracts.test_transports import AB, get, put
from vllm_omni_sched.config.errors import NoRoomError, RendezvousError
from vllm_omni_sched.connectors.framing import make_message
from vllm_omni_sched.connectors.transport import Status
from vllm_omni_sched.omni.foreign_transport import ForeignTransport

pytestmark = pytest.mark.omni


class Refusing:
    """A connector that says no."""

    supports_raw_data = False

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def put(self, *_: Any) -> tuple[bool, int, None]:
        if self._error is not None:
            raise self._error
        return False, 0, None

    def get(self, *_: Any) -> None:
        if self._error is not None:
            raise self._error

    def health(self) -> dict[str, Any]:
        return {"status": "healthy"}

    def cleanup(self, request_id: str) -> None: ...

    def close(self) -> None: ...


def test_a_connector_that_refuses_makes_its_path_sick() -> None:
    path = ForeignTransport("no", Refusing())
    with pytest.raises(NoRoomError, match=r"Refusing refused \d+ bytes on edge a->b"):
        path.put(make_message(AB, "k", 1))
    assert path.health().status is Status.SICK
    assert path.health().facts["refused"] == 1


def test_what_a_connector_raises_is_an_error_of_ours() -> None:
    path = ForeignTransport("bad", Refusing(RuntimeError("out of order")))
    with pytest.raises(NoRoomError, match=r"refused \d+ bytes on edge a->b: out of order"):
        path.put(make_message(AB, "k", 1))
    with pytest.raises(RendezvousError, match="transport bad failed to get message 'k' of edge a->b: out of order"):
        path.get(AB, "k")


class Buffer:
    """Memory of a connector's own, as ManagedBuffer of vLLM-Omni."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.released = tensor, 0

    def release(self) -> None:
        self.released += 1


class Pooled(Refusing):
    """A connector that gives each message once, in a buffer of its own."""

    supports_raw_data = True

    def __init__(self) -> None:
        super().__init__()
        self.buffers: dict[str, Buffer] = {}
        self.given: list[Buffer] = []

    def put(self, source: str, target: str, key: str, payload: torch.Tensor) -> tuple[bool, int, None]:
        self.buffers[key] = Buffer(payload)
        return True, payload.numel(), None

    def get(self, source: str, target: str, key: str, metadata: Any) -> tuple[Buffer, int] | None:
        if (buffer := self.buffers.pop(key, None)) is None:
            return None
        self.given.append(buffer)
        return buffer, buffer.tensor.numel()

    def reap_consumed(self) -> None: ...


class Raced(deque[Any]):
    """Between looking whether there is something and taking it, another thread does ``other``."""

    other: Any = None

    def __bool__(self) -> bool:
        found, other, self.other = len(self) > 0, self.other, None
        if other is not None:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
        return found


def test_two_threads_that_release_the_same_buffer_lose_no_message() -> None:
    connector = Pooled()
    path, got = ForeignTransport("pool", connector), []
    path._back = back = Raced()
    for key in ("first", "second", "third"):
        put(path, key, key)
    assert get(path, "first") == "first"
    gc.collect()
    assert len(back) == 1
    back.other = lambda: got.append(path.get(AB, "third"))  # and keeps it
    assert get(path, "second") == "second"
    assert [arrival.open() for arrival in got] == ["third"]
    assert [buffer.released for buffer in connector.given] == [1, 0, 0]


@pytest.mark.parametrize(
    "how", [lambda path: path.get(AB, "nothing"), lambda path: path.reap(), ForeignTransport.close]
)
def test_buffers_go_back_when_nothing_more_arrives(how: Any) -> None:
    connector = Pooled()
    path = ForeignTransport("pool", connector)
    put(path, "k", {"x": torch.ones(5000)})
    held = get(path, "k")
    path.reap()
    assert [buffer.released for buffer in connector.given] == [0]
    assert held["x"].sum() == 5000
    del held
    gc.collect()
    how(path)
    assert [buffer.released for buffer in connector.given] == [1]
