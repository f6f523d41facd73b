"""A server with our scheduler, as its clients and its operator see it: refusals, and what its log says."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.engine.harness.processes import OUR_PLUGIN, WORKER_IN_ENGINE_CORE
from tests.engine.harness.server import MODEL_NAME, Server
from tests.engine.harness.spec import OURS
from vllm_omni_sched import __version__
from vllm_omni_sched.cli import app
from vllm_omni_sched.compat import vllm_version
from vllm_omni_sched.monitor.counts import CLASSES

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
PATIENCE_SECONDS = 60
OPTIONS = {"profile": "chat", "prefill_control": "off", "client_ttft_ms_min": 100, "strip_frontier": "off"}


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file in which the server writes the history of its requests."""
    return tmp_path_factory.mktemp("history") / "history.jsonl"


@pytest.fixture(scope="module")
def servers(llava: Path, history: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ["--scheduler-cls", OURS, "--max-model-len", "1024"]
    ours = {**OPTIONS, "expert": {"history_path": str(history)}}
    options += ["--additional-config", json.dumps({"omni_sched": ours})]
    environment = {**OUR_PLUGIN, **WORKER_IN_ENGINE_CORE, "VLLM_LOGGING_LEVEL": "INFO"}  # as it is by default
    with Server(llava, options, environment, log=tmp_path_factory.mktemp("serving") / "server.log") as server:
        server.wait_until_healthy()
        yield server


def ask(server: Server, path: str, xargs: dict[str, Any], **more: Any) -> tuple[int, str]:
    """Ask the server; return (status, answer)."""
    asked: dict[str, Any] = {
        CHAT: {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2},
        COMPLETIONS: {"prompt": "hello", "max_tokens": 2},
        RESPONSES: {"input": "hello", "max_output_tokens": 2, "store": False},
    }[path]
    body = {"model": MODEL_NAME, "vllm_xargs": xargs, **asked, **more}
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)["error"]["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("xargs", "says"),
    [
        ({"omni_class": "vip"}, "omni_class is 'vip', which is not an SLA class: it must be one of interactive, batch"),
        ({"omni_class": "realtime"}, "which clients of this server may not ask for (option 'client_classes')"),
        ({"omni_ttft_ms": "fast"}, "omni_ttft_ms must be a number of milliseconds above 0, got 'fast'"),
        ({"omni_ttft_ms": -5}, "omni_ttft_ms must be a number of milliseconds above 0, got -5"),
        ({"omni_ttft_ms": 99}, "omni_ttft_ms must be 100 or more on this server (option 'client_ttft_ms_min'), got 99"),
        ({"omni_clas": "batch"}, "unknown key 'omni_clas': did you mean 'omni_class'? known keys are omni_class, "),
    ],
)
def test_what_makes_no_sense_is_a_400_that_says_why(servers: Server, path, stream, xargs, says):
    status, message = ask(servers, path, xargs, stream=stream)
    assert (status, says in message) == (400, True), message


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
@pytest.mark.parametrize("stream", [False, True])
def test_what_makes_sense_is_served(servers: Server, path, stream):
    for xargs in ({"omni_class": "batch", "omni_ttft_ms": 100}, {"somebody_elses": "vip"}, {"omni_user": "anna"}):
        status, answer = ask(servers, path, xargs, stream=stream)
        assert status == 200
        assert '"error":{' not in answer.replace(" ", "")


def test_the_engine_never_sees_what_is_refused(servers: Server):
    for _ in range(3):
        assert ask(servers, CHAT, {"omni_class": "vip"})[0] == 400
    log = servers.process.log.read_text()
    assert "is refused" not in log
    assert "500 Internal Server Error" not in log
    assert ask(servers, CHAT, {})[0] == 200


def lines_of_ours(server: Server, starts: str) -> list[str]:
    return [line for line in server.process.log.read_text().splitlines() if starts in line]


def of_command(*arguments: object) -> dict[str, Any] | None:
    """Return what `vllm-omni-sched … --json` prints; None if it says that there is nothing yet."""
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"], catch_exceptions=False)
    return json.loads(result.stdout) if result.exit_code == 0 else None


def until(found: Callable[[], Any]) -> Any:
    """Return what is found, once it is; the engine core publishes every second, and writes on a thread."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (value := found()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return value


def test_top_shows_what_the_server_does(servers: Server):
    assert ask(servers, CHAT, {"omni_class": "batch"})[0] == 200

    def frame() -> dict[str, Any] | None:
        found = of_command("top", f"127.0.0.1:{servers.port}", "--once")
        return found if found and found["steps"] >= 2 and found["requests"]["running"] == 0 else None

    shown = until(frame)
    assert sum(shown["requests"]["admitted"].values()) >= 1
    assert shown["requests"]["waiting"] == 0
    assert shown["requests"]["waiting_by_class"] == dict.fromkeys(CLASSES, 0)
    assert 0 <= shown["requests"]["kv_cache_usage"] < 1
    assert shown["encoder_cache"]["hit_rate"] is None  # there was no picture


def test_explain_tells_what_happened_to_a_request(servers: Server, history: Path):
    status, answer = ask(servers, CHAT, {"omni_class": "batch"})
    assert status == 200
    request_id = json.loads(answer)["id"]

    def story() -> dict[str, Any] | None:
        found = of_command("explain", request_id, history)
        return found if found and found["entries"][-1]["transition"] == "left" else None

    told = until(story)
    transitions = [entry["transition"] for entry in told["entries"]]
    assert transitions == ["entered", "taken", "started", "first_token", "left"]
    assert told["entries"][0]["detail"] == "batch"
    assert set(told["waits_seconds"]) <= {"queue", "computing"}


def test_one_line_at_the_start_says_what_is_active(servers: Server, history: Path):
    (line,) = lines_of_ours(servers, f"vllm-omni-sched {__version__} schedules this engine")
    assert " INFO " in line
    assert "EngineCore" in line  # it works there
    assert (
        f"schedules this engine on vLLM {vllm_version()}: {OURS}, without async scheduling, which vLLM always " in line
    )
    profile, rest = line.split("Profile chat, for chat with pictures and audio clips: ")[1].split(". Options given: ")
    assert profile == (
        "pictures, sounds and videos are encoded beside the steps of the LLM (encode_ahead=true); waiting requests run "
        "by class and deadline (waiting_order=sla); latencies are measured by class (slo_metrics=true); targets are "
        "interactive_ttft_ms=2000.0, interactive_itl_ms=100.0, control_target_ms=80.0"
    )
    given = rest.split(". Features on: ")[0]
    assert given == (
        f"profile=chat, expert.strip_frontier=off, client_ttft_ms_min=100.0, prefill_control=off, "
        f"expert.history_path={history}"
    )
    assert len(lines_of_ours(servers, "rofile chat")) == 1
    on, off = line.split("Features on: ")[1].split("; off: ")
    assert {"windows", "encoder_cache", "session_delta"} <= set(on.split(", "))
    assert "strip_frontier (switched off)" in off
    assert "pending_range (" in off
