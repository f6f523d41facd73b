"""A server under minutes of mixed traffic, of which a part is given up by its clients half-way.

SOAK_SECONDS sets the length. Afterwards nothing may run or wait, the server must answer as before, and it must hold no
more descriptors than after the first part of the traffic.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from PIL import Image

from tests.engine.harness.processes import OUR_PLUGIN
from tests.engine.harness.server import MODEL_NAME, Server
from tests.engine.harness.spec import OURS
from tests.engine.harness.video_choice import VARIABLE
from tests.support.clips import clip, scene

SECONDS = float(os.environ.get("SOAK_SECONDS", "600"))
CLIENTS = 8
GIVEN_UP = 0.3
"""Fraction of the requests whose client disconnects before the answer is complete."""
FIXED = 12
"""Requests whose answers are compared before and after the traffic."""
PATIENCE_SECONDS = 120.0
OPTIONS = {
    "encode_ahead": True,
    "encode_rounds": False,
    "waiting_order": "sla",
    "itl_target_ms": 50,
    "video": {"decoders": 2},
}

pytestmark = [pytest.mark.engine, pytest.mark.long]


@pytest.fixture(scope="module")
def server(qwen2_vl: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ["--scheduler-cls", OURS, "--max-model-len", "2048", "--max-num-batched-tokens", "512"]
    options += ["--limit-mm-per-prompt", '{"image": 3, "video": 1}']
    options += ["--additional-config", json.dumps({"omni_sched": OPTIONS})]
    log = tmp_path_factory.mktemp("soak") / "server.log"
    with Server(qwen2_vl, options, {**OUR_PLUGIN, **VARIABLE}, log=log) as server:
        server.wait_until_healthy()
        yield server


def picture(seed: int) -> str:
    """Return a picture as a data URL; each seed has other content and another size."""
    content = BytesIO()
    Image.fromarray(scene(seed, 56 + 28 * (seed % 4), 56 + 28 * (seed % 3))).save(content, "PNG")
    return "data:image/png;base64," + base64.b64encode(content.getvalue()).decode()


def question(rng: random.Random) -> dict[str, Any]:
    """Return the body of a chat request: text alone, with one to three pictures, or with a video."""
    content: list[dict[str, Any]] = [{"type": "text", "text": "what is it? " * rng.randint(1, 30)}]
    kind = rng.choices(["text", "pictures", "video"], [4, 5, 1])[0]
    if kind == "pictures":
        urls = [picture(rng.randrange(40)) for _ in range(rng.randint(1, 3))]
        content += [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    elif kind == "video":
        video = base64.b64encode(clip(rng.choice(["h264_vfr", "vp9"]))).decode()
        content.append({"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{video}"}})
    return {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": rng.randint(1, 48),
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "vllm_xargs": {"omni_class": rng.choice(["interactive", "batch"])},
    }


async def ask(client: httpx.AsyncClient, body: dict[str, Any], leave_after: int | None = None) -> str | None:
    """Return the text of an answer; None when the client left after that many pieces of it."""
    pieces: list[str] = []
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        if leave_after == 0:
            return None
        ended = False
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                ended = True
            elif line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                pieces += [choice["delta"].get("content") or "" for choice in event["choices"]]
                if leave_after is not None and len(pieces) >= leave_after:
                    return None
    assert ended, f"the answer broke off after {len(pieces)} pieces"
    return "".join(pieces)


async def traffic(client: httpx.AsyncClient, seconds: float, seed: int) -> Counter[str]:
    """Send requests with `CLIENTS` clients at once for this long, and return how many of each kind ended."""
    outcomes: Counter[str] = Counter()
    until = time.monotonic() + seconds

    async def one(rng: random.Random) -> None:
        while time.monotonic() < until:
            leave_after = rng.randint(0, 6) if rng.random() < GIVEN_UP else None
            answer = await ask(client, question(rng), leave_after)
            outcomes["given up" if answer is None else "answered"] += 1

    async with asyncio.timeout(seconds + PATIENCE_SECONDS), asyncio.TaskGroup() as clients:
        for number in range(CLIENTS):
            clients.create_task(one(random.Random(f"{seed}-{number}")))
    return outcomes


def wait_until_idle(server: Server) -> None:
    """Return when no request runs or waits."""
    until = time.monotonic() + PATIENCE_SECONDS
    while busy := [name for name in ("running", "waiting") if server.metric(f"vllm:num_requests_{name}", MODEL_NAME)]:
        assert time.monotonic() < until, f"requests are still {' and '.join(busy)}"
        time.sleep(0.5)
    time.sleep(5)  # connections and lanes that are closed a little later


def held(server: Server) -> tuple[int, int]:
    """Return the open descriptors and the resident bytes of the server with its processes."""
    parent = psutil.Process(server.process.pid)
    processes = [parent, *parent.children(recursive=True)]
    return sum(p.num_fds() for p in processes), sum(p.memory_info().rss for p in processes)


def test_minutes_of_traffic_leave_nothing_behind(server: Server) -> None:
    fixed = [question(random.Random(f"fixed-{number}")) for number in range(FIXED)]

    async def whole() -> None:
        limits = httpx.Limits(max_connections=CLIENTS, max_keepalive_connections=0)
        url = f"http://127.0.0.1:{server.port}"
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_SECONDS, limits=limits) as client:
            before = [await ask(client, body) for body in fixed]
            outcomes = await traffic(client, SECONDS / 3, seed=1)
            await asyncio.to_thread(wait_until_idle, server)
            descriptors, resident = held(server)
            outcomes += await traffic(client, SECONDS * 2 / 3, seed=2)
            await asyncio.to_thread(wait_until_idle, server)
            descriptors_after, resident_after = held(server)
            print(f"{dict(outcomes)}; descriptors {descriptors} -> {descriptors_after}, ", end="")
            print(f"resident {resident / 2**20:.0f} -> {resident_after / 2**20:.0f} MB")
            assert outcomes["answered"] > 0
            assert outcomes["given up"] > 0
            assert [await ask(client, body) for body in fixed] == before
        assert descriptors_after <= descriptors + 4  # a leak adds some per request
        assert server.metric("vllm:omni_sched_videos_total", "decoded") > 0

    asyncio.run(whole())
    errors = [line for line in server.process.log.read_text().splitlines() if " ERROR " in line or "Traceback" in line]
    assert errors == []
