"""Realtime transcription as a client meets it: `vllm serve`, and the websocket of `/v1/realtime`."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.engine.harness.processes import NO_PLUGIN, OUR_PLUGIN, WORKER_IN_ENGINE_CORE
from tests.engine.harness.server import Server
from tests.engine.harness.spec import OURS

MISTRAL = ["--tokenizer-mode", "mistral", "--config-format", "mistral", "--max-model-len", "4096"]
METRICS_SECONDS = 60

pytestmark = pytest.mark.newest


class Sessions(NamedTuple):
    alone: dict[str, Any]
    together: list[dict[str, Any]]


@pytest.fixture(scope="module")
def servers(voxtral: Path, tmp_path_factory: pytest.TempPathFactory):
    logs = tmp_path_factory.mktemp("servers")
    with ExitStack() as stack:
        both = {
            "stock": Server(voxtral, MISTRAL, NO_PLUGIN | WORKER_IN_ENGINE_CORE, log=logs / "stock.log"),
            "ours": Server(
                voxtral, [*MISTRAL, "--scheduler-cls", OURS], OUR_PLUGIN | WORKER_IN_ENGINE_CORE, log=logs / "ours.log"
            ),
        }
        for server in both.values():
            stack.enter_context(server)
        for server in both.values():
            server.wait_until_healthy()
        yield both


@pytest.fixture(scope="module")
def heard(servers) -> dict[str, Sessions]:
    return {name: asyncio.run(_listen(server)) for name, server in servers.items()}


async def _listen(server: Server) -> Sessions:
    alone = await server.transcribe(1, frames=200)
    together = await asyncio.gather(
        server.transcribe(1, frames=120),
        server.transcribe(2, frames=60, leave_after=20),
        server.transcribe(3, frames=80),
    )
    return Sessions(alone, together)


def test_same_transcription(heard):
    assert len(heard["stock"].alone["pieces"]) > 200
    assert heard["ours"].alone == heard["stock"].alone


def test_same_transcriptions_side_by_side_while_one_client_hangs_up(heard):
    assert heard["ours"].together == heard["stock"].together


def test_the_sound_decides_the_text(heard):
    """Check the other tests: were the text the same whatever is heard, comparing it would prove nothing."""
    texts = [heard["stock"].alone["text"], *(session.get("text") for session in heard["stock"].together)]
    assert len(set(texts)) == 4
    assert sum(piece != "" for piece in heard["stock"].alone["pieces"]) > 50


def test_the_server_goes_on_serving(servers, heard):
    again = asyncio.run(servers["ours"].transcribe(1, frames=200))
    assert again == heard["ours"].alone


def test_updates_were_sent_as_deltas(servers, heard):
    """By our own metrics, which the engine core publishes every second."""
    expected = (
        len(heard["ours"].alone["pieces"]) + sum(len(session["pieces"]) for session in heard["ours"].together) - 4
    )
    deadline = time.monotonic() + METRICS_SECONDS
    while (counted := _deltas(servers["ours"])) < expected and time.monotonic() < deadline:
        time.sleep(0.5)
    assert counted >= expected
    assert _deltas(servers["stock"]) == 0


def _deltas(server: Server) -> float:
    return server.metric("vllm:omni_sched_session_updates_total", "delta")
