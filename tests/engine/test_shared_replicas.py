"""`vllm serve --data-parallel-size 2` with shared encodings: each picture is encoded by one of its two engines."""

from __future__ import annotations

import base64
import json
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness.data_parallel import ONE_NUMA_NODE
from tests.engine.harness.preprocessing import encoded
from tests.engine.harness.processes import NO_PLUGIN, OUR_PLUGIN
from tests.engine.harness.server import MODEL_NAME, Server
from tests.engine.harness.spec import OURS
from vllm_omni_sched import compat

pytestmark = [
    pytest.mark.engine,
    pytest.mark.long,
    pytest.mark.skipif(
        not compat.ec_connectors_hold_back(), reason="connectors of this vLLM cannot hold requests back"
    ),
]
PICTURES, REQUESTS = 5, 16
ITEMS = 2 * REQUESTS
PATIENCE_SECONDS = 120
NAME = "vllm:omni_sched_"


def question(at: int) -> dict[str, Any]:
    """Ask about two of the pictures; which two depends on the number of the request."""
    files = [encoded(number % PICTURES, "PNG", (28, 28)) for number in (at, at * at + at // PICTURES + 1)]
    urls = ["data:image/png;base64," + base64.b64encode(data).decode() for data in files]
    content = [*({"type": "image_url", "image_url": {"url": url}} for url in urls), {"type": "text", "text": f"{at}?"}]
    return {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
    }


def answers(server: Server) -> list[str]:
    def ask(at: int) -> str:
        request = urllib.request.Request(
            f"http://127.0.0.1:{server.port}/v1/chat/completions",
            json.dumps(question(at)).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            text: str = json.load(answer)["choices"][0]["message"]["content"]
            return text

    with ThreadPoolExecutor(8) as clients:
        return list(clients.map(ask, range(REQUESTS)))


@pytest.fixture(scope="module")
def servers(llava: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """Return stock with one engine, and ours with two that share their encodings."""
    folder = tmp_path_factory.mktemp("replicas")
    options = ["--max-model-len", "1024", "--limit-mm-per-prompt", '{"image": 4}', "--no-enable-prefix-caching"]
    with ExitStack() as stack:
        found = {"stock": stack.enter_context(Server(llava, options, NO_PLUGIN, log=folder / "stock"))}
        store = folder / "store"
        store.mkdir()
        expert = {"encoder_share_dir": str(store), "encoder_share_wait_seconds": 60.0}
        ours = {"omni_sched": {"encoder_share_bytes": 1 << 26, "expert": expert}}
        arguments = ["--scheduler-cls", OURS, "--additional-config", json.dumps(ours), "--data-parallel-size", "2"]
        server = Server(llava, options + arguments, {**OUR_PLUGIN, **ONE_NUMA_NODE}, log=folder / "shared")
        found["shared"] = stack.enter_context(server)
        for server in found.values():
            server.wait_until_healthy()
        yield found


@pytest.fixture(scope="module")
def heard(servers: dict[str, Server]) -> dict[str, list[str]]:
    return {name: answers(server) for name, server in servers.items()}


def counted(server: Server) -> dict[str, float]:
    """Return where the encodings of all engines were, once their metrics tell of all items."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        looked_up = sum(server.metric(f"{NAME}encoder_cache_lookups_total", result) for result in ("hit", "miss"))
        if looked_up >= ITEMS:
            return {place: server.metric(f"{NAME}shared_encodings_total", place) for place in ("host", "made")}
        assert time.monotonic() < deadline, f"the metrics tell of {looked_up} items"
        time.sleep(0.2)


def test_each_picture_is_encoded_once_by_two_engines_with_the_tokens_of_stock(
    servers: dict[str, Server], heard: dict[str, list[str]]
) -> None:
    assert len(set(heard["stock"])) > 1
    assert heard["shared"] == heard["stock"]
    places = counted(servers["shared"])
    assert places["made"] == PICTURES
    assert places["host"] > 0  # both engines needed pictures
