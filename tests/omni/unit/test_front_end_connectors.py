"""Count what the front end holds open for payloads: a connector for all stages, and nothing of replicas that died."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory

from tests.support.arena import place, small
from tests.support.descriptors import opened
from vllm_omni_sched.connectors.arena import transport
from vllm_omni_sched.omni.connector import ArenaConnector
from vllm_omni_sched.omni.registration import register_connectors
from vllm_omni_sched.omni.stages.payloads import Payloads

pytestmark = pytest.mark.omni

STAGES = range(1, 4)  # that receive payloads
IN_RING, IN_POOL = 16, 1 << 17  # values of a payload


@pytest.fixture
def extra() -> Iterator[dict[str, Any]]:
    register_connectors()
    with place() as root:
        yield small(root).model_dump(mode="json", exclude_unset=True)


def pool(stage_id: int, name: str, extra: dict[str, Any]) -> Any:
    config = {"name": name, "extra": {**extra, "stage_id": stage_id}}
    return SimpleNamespace(
        stage_id=stage_id,
        stage_vllm_config=SimpleNamespace(model_config=SimpleNamespace(stage_connector_config=config)),
    )


@contextmanager
def replica(extra: dict[str, Any], request_id: str) -> Iterator[None]:
    """Run a process that has sent a payload to each stage, and kill it in the end."""
    ready, sent = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            connector = ArenaConnector(extra)
            for stage in STAGES:
                payload = {"ids": list(range(IN_RING if stage % 2 else IN_POOL))}
                assert connector.put(str(stage - 1), str(stage), f"{request_id}_{stage - 1}_0", payload)[0]
            os.write(sent, b".")
            signal.pause()
        finally:
            os._exit(1)
    os.close(sent)
    assert os.read(ready, 1) == b"."
    os.close(ready)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_the_front_end_opens_no_more_files_with_each_restart(
    extra: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the files of a replica once, however many stages there are."""
    monkeypatch.setattr(transport, "BURY_EVERY", 0.0)
    payloads, after = Payloads(lambda name: name), []
    pools = [pool(stage, "ArenaConnector", extra) for stage in STAGES]
    for number in range(4):
        with replica(extra, f"request {number}"):
            for one in pools:
                assert payloads.take(one, f"request {number}") is not None
            outboxes = [count for name, count in opened().items() if name.endswith(".out")]
            assert outboxes == [2]  # its descriptor, and that of its mapping
        assert payloads.take(pools[0], "none") is None
        after.append(opened())
    payloads.close()
    assert after[3] == after[1]


def test_two_threads_get_one_connector(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, made = threading.Barrier(2), []

    def create_connector(spec: Any) -> Any:
        made.append(spec)
        threading.Event().wait(0.05)  # the other thread asks meanwhile
        return SimpleNamespace(get=lambda *_: None)

    def take() -> None:
        asked.wait()
        payloads.take(pool(1, "ArenaConnector", {}), "a")

    monkeypatch.setattr(OmniConnectorFactory, "create_connector", create_connector)
    payloads = Payloads(lambda name: name)
    threads = [threading.Thread(target=take) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


def test_stages_with_other_options_have_a_connector_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def create_connector(spec: Any) -> Any:
        made.append(spec)
        return SimpleNamespace(get=lambda *_: None)

    monkeypatch.setattr(OmniConnectorFactory, "create_connector", create_connector)
    payloads = Payloads(lambda name: name)
    for one in (pool(1, "A", {}), pool(2, "A", {"x": 1}), pool(3, "B", {"x": 1}), pool(4, "A", {"x": 1})):
        payloads.take(one, "a")
    assert [(spec.name, spec.extra.get("x")) for spec in made] == [("A", None), ("A", 1), ("B", 1)]
