"""Videos as clients send them: `vllm serve` with our loader, chosen by the environment variable alone.

What stock vLLM answers is asked of the same server: a request may name vLLM's own loader.
"""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness.processes import OUR_PLUGIN, WORKER_IN_ENGINE_CORE
from tests.engine.harness.server import MODEL_NAME, Server
from tests.engine.harness.video_choice import VARIABLE
from tests.support.clips import audio_only, clip

pytestmark = pytest.mark.newest

STOCK = {"video_backend": "qwen2_vl"}  # the loader of the model's video processor
SOUND = ["h264_open_gop", "h264_vfr", "vp9", "h264_trimmed"]


@pytest.fixture(scope="module")
def servers(qwen2_vl: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ["--max-model-len", "4096", "--additional-config", json.dumps({"omni_sched": {"video": {"decoders": 2}}})]
    options += trusting()
    log = tmp_path_factory.mktemp("video") / "server.log"
    environment = {**OUR_PLUGIN, **VARIABLE, **WORKER_IN_ENGINE_CORE}
    with Server(qwen2_vl, options, environment, log=log) as server:
        server.wait_until_healthy()
        yield server


def trusting() -> list[str]:
    """The flag without which newer vLLMs refuse `media_io_kwargs` of requests."""
    for package in ("vllm.entrypoints.common", "vllm.entrypoints.launchers"):  # of 0.33, and of those before
        if find_spec(package) is not None and find_spec(f"{package}.cli_args") is not None:
            arguments = import_module(f"{package}.cli_args").BaseFrontendArgs
            return ["--trust-request-mm-kwargs"] if hasattr(arguments, "trust_request_mm_kwargs") else []
    return []


def ask(server: Server, video: bytes, **media_io: Any) -> tuple[int, str]:
    """Ask the server about a video; return (status, answer or error)."""
    url = "data:video/mp4;base64," + base64.b64encode(video).decode()
    content = [{"type": "video_url", "video_url": {"url": url}}, {"type": "text", "text": "what?"}]
    body = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 16,
        "temperature": 0,
        "ignore_eos": True,
        "media_io_kwargs": {"video": media_io},
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return 200, json.load(answer)["choices"][0]["message"]["content"]
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)["error"]["message"]


def videos(server: Server, outcome: str) -> float:
    return server.metric("vllm:omni_sched_videos_total", outcome)


def decoders_of(server: Server) -> int:
    """Decoder processes of this server."""
    parent = f"--parent={server.process.pid}".encode()
    commands = (path / "cmdline" for path in Path("/proc").glob("[0-9]*"))
    return sum(parent in command.read_bytes().split(b"\0") for command in commands if command.exists())


@pytest.mark.parametrize("target", [{}, {"fps": 4}])
def test_same_tokens_as_with_vllm_s_own_loader(servers, target):
    before = videos(servers, "decoded")
    ours = {name: ask(servers, clip(name), **target) for name in SOUND}
    assert videos(servers, "decoded") == before + len(SOUND)
    assert ours == {name: ask(servers, clip(name), **target, **STOCK) for name in SOUND}
    assert videos(servers, "decoded") == before + len(SOUND)  # the others were not ours
    assert {status for status, _ in ours.values()} == {200}
    assert len(set(ours.values())) > 1  # what is seen matters


def test_many_at_once(servers):
    alone = {name: ask(servers, clip(name)) for name in SOUND}
    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(lambda name: (name, ask(servers, clip(name))), SOUND * 3))
    assert all(answer == alone[name] for name, answer in answers)


@pytest.mark.parametrize(
    ("video", "kwargs", "says"),
    [
        (b"not a video" * 100, {}, "the file is not a readable video"),
        (audio_only, {}, "the file has no video stream"),
        (lambda: clip("h264"), {"sampling": "qwen2_vll"}, "sampling is 'qwen2_vll', which is none of vLLM's"),
        (lambda: clip("h264"), {"omni_class": "urgent"}, "omni_class is 'urgent'; it must be one of"),
    ],
)
def test_what_cannot_be_served_is_a_400_that_says_why(servers, video, kwargs, says):
    status, message = ask(servers, video() if callable(video) else video, **kwargs)
    assert status == 400
    assert says in message
    assert ask(servers, clip("h264"))[0] == 200


def test_metrics_are_shown(servers):
    bad = videos(servers, "bad_input")
    used = servers.metric("vllm:omni_sched_video_frames_total", "used")
    ask(servers, b"not a video")
    ask(servers, clip("vp9"), fps=2)
    assert videos(servers, "bad_input") == bad + 1
    assert servers.metric("vllm:omni_sched_video_frames_total", "used") > used
    for stage in ("index", "wait", "decode", "convert", "assemble"):
        assert servers.metric("vllm:omni_sched_video_stage_seconds_count", stage) == videos(servers, "decoded")
    assert "\nvllm:omni_sched_video_decoders 2.0\n" in servers.get("/metrics")


def test_its_decoders_end_with_it(servers):
    assert decoders_of(servers) == 2
    servers.process.stop()
    assert decoders_of(servers) == 0
