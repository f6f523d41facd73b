"""Which thread may take requests out of the deques in which vLLM-Omni's scheduler parks them."""

from __future__ import annotations

import threading
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from vllm_omni.distributed.omni_connectors.transfer_adapter.chunk_transfer_adapter import OmniChunkTransferAdapter

from vllm_omni_sched.omni.parked_requests import VARIABLE, hook, in_stages

pytestmark = pytest.mark.omni

DISCARD = "_discard_from_chunk_deque"


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM-Omni's adapter with two parked requests, whose sending thread takes one of them out."""

    def save_loop(self: Any) -> None:
        self._discard_from_chunk_deque(self.parked, "a")

    monkeypatch.setattr(OmniChunkTransferAdapter, "save_loop", save_loop)
    monkeypatch.setattr(OmniChunkTransferAdapter, DISCARD, vars(OmniChunkTransferAdapter)[DISCARD])
    made = object.__new__(OmniChunkTransferAdapter)
    made.parked = deque([SimpleNamespace(request_id="a"), SimpleNamespace(request_id="b")])
    return made


def left_by_its_sending_thread(adapter: Any) -> list[str]:
    thread = threading.Thread(target=adapter.save_loop)
    thread.start()
    thread.join()
    return [request.request_id for request in adapter.parked]


def test_the_sending_thread_leaves_parked_requests_to_the_scheduler(
    adapter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    hook()
    hook()
    assert left_by_its_sending_thread(adapter) == ["a", "b"]
    adapter._discard_from_chunk_deque(adapter.parked, "a")  # as the scheduler does, when the request has ended
    assert [request.request_id for request in adapter.parked] == ["b"]


def test_stages_without_our_scheduler_stay_as_they_are(adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    hook()
    assert left_by_its_sending_thread(adapter) == ["b"]


def test_only_stages_of_a_pipeline_with_our_key_are_asked() -> None:
    environ: dict[str, str] = {}
    in_stages(environ, on=True)
    assert environ == {VARIABLE: "1"}
    in_stages(environ, on=False)
    assert environ == {}
