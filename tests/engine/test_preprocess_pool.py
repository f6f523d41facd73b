"""The preprocessing pool in vLLM: the same tensors, hashes and tokens as without it, even if its processes die."""

from __future__ import annotations

import base64
import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness.preprocessing import KINDS, encoded
from tests.engine.harness.processes import (
    NO_PLUGIN,
    OUR_PLUGIN,
    ROOT,
    WORKER_IN_ENGINE_CORE,
    run_program,
    write_model,
)
from tests.engine.harness.server import MODEL_NAME, Server

pytestmark = pytest.mark.engine
MODELS = ("llava-4-tokens", *(pytest.param(name, marks=pytest.mark.once) for name in ("qwen2-vl", "qwen2-audio")))


@pytest.fixture(scope="module", params=MODELS)
def rendered(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    name: str = request.param
    sizes = {"image_size": 28} if name.startswith("llava") else {}
    model = write_model(name.removesuffix("-4-tokens"), ROOT / ".models" / name, **sizes)
    log = tmp_path_factory.mktemp("rendered") / "log"
    found: dict[str, Any] = run_program("tests.engine.harness.preprocessing", model, environment=OUR_PLUGIN, log=log)
    return found


@pytest.mark.parametrize("what", ["one by one", "together", "broken"])
def test_items_are_prepared_as_without_the_pool(rendered: dict[str, Any], what: str) -> None:
    assert rendered["stock"][what] == rendered["ours"][what]


def test_requests_survive_the_death_of_all_processes(rendered: dict[str, Any]) -> None:
    assert rendered["kills"] == rendered["stock"]["together"]


def test_a_cancelled_request_leaves_nothing(rendered: dict[str, Any]) -> None:
    cancelled = rendered["cancelled"]
    assert cancelled["error"] == "CancelledError"
    assert cancelled["held_bytes"] == 0
    assert cancelled["again"] == rendered["stock"]["one by one"][0]
    assert rendered["jobs"]["cancelled"] == 1


def test_the_pool_has_done_the_work(rendered: dict[str, Any]) -> None:
    """Only pictures whose header does not say how they will be decoded are decoded in the API process."""
    outcomes, fallbacks = rendered["jobs"], rendered["fallbacks"]
    pictures = bool(rendered["stock"]["broken"])
    assert outcomes["done"] >= (20 if pictures else 9)
    assert outcomes.keys() == {"done", "cancelled", *(["bad_input"] if pictures else [])}
    assert fallbacks.keys() == ({"format"} if pictures else set())


def test_threads_leave_the_interpreter_to_the_event_loop_sooner(rendered: dict[str, Any]) -> None:
    assert rendered["ours"]["switch seconds"] < rendered["stock"]["switch seconds"]


def picture_question(at: int) -> dict[str, Any]:
    files = [encoded(10 * at, KINDS[at % len(KINDS)], (200, 150)), encoded(10 * at + 1, "JPEG", (300, 200))]
    urls = ["data:image/any;base64," + base64.b64encode(data).decode() for data in files]
    return {
        "model": MODEL_NAME,
        "messages": [
            {
                "role": "user",
                "content": [
                    *({"type": "image_url", "image_url": {"url": url}} for url in urls),
                    {"type": "text", "text": f"what is in picture {at}?"},
                ],
            }
        ],
        "max_tokens": 16,
        "temperature": 0,
        "ignore_eos": True,
        "vllm_xargs": {},
    }


@pytest.fixture(scope="module")
def servers(llava: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    folder = tmp_path_factory.mktemp("preprocess")
    options = ["--max-model-len", "1024", "--limit-mm-per-prompt", '{"image": 4}']
    ours = ["--scheduler-cls", "vllm_omni_sched.OmniScheduler"]
    ours += ["--additional-config", json.dumps({"omni_sched": {"preprocess": {"processes": 2}}})]
    with ExitStack() as stack:
        found = [
            stack.enter_context(Server(llava, options + more, {**plugin, **WORKER_IN_ENGINE_CORE}, log=folder / name))
            for name, more, plugin in (("stock", [], NO_PLUGIN), ("ours", ours, OUR_PLUGIN))
        ]
        for server in found:
            server.wait_until_healthy()
        yield found[0], found[1]


def answers(server: Server, questions: list[dict[str, Any]]) -> list[str]:
    def ask(question: dict[str, Any]) -> str:
        request = urllib.request.Request(
            f"http://127.0.0.1:{server.port}/v1/chat/completions",
            json.dumps(question).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            text: str = json.load(answer)["choices"][0]["message"]["content"]
            return text

    with ThreadPoolExecutor(8) as clients:
        return list(clients.map(ask, questions))


def test_servers_give_the_same_answers(servers: tuple[Server, Server]) -> None:
    questions = [picture_question(at) for at in range(12)]
    questions[3]["vllm_xargs"] = {"omni_class": "batch"}
    stock, ours = servers
    assert answers(ours, questions) == answers(stock, [{**one, "vllm_xargs": {}} for one in questions])
    assert 'vllm:omni_sched_preprocess_jobs_total{outcome="done"} ' in ours.get("/metrics")
    assert "omni_sched_preprocess" not in stock.get("/metrics")
