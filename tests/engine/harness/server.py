"""A real `vllm serve`, and a client of its realtime transcription."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import socket
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dev.child_process import ChildProcess
from tests.engine.harness.media import sound
from tests.engine.harness.processes import ENVIRONMENT
from tests.support.warm import WarmPopen

MODEL_NAME = "tiny"
START_SECONDS = 600
ANSWER_SECONDS = 300


class Server:
    """`vllm serve` in the background; a context manager that leaves nothing running."""

    def __init__(
        self, model: Path, options: Sequence[str], environment: Mapping[str, str], *, log: Path, port: int | None = None
    ) -> None:
        self.port = free_port() if port is None else port
        command = [str(Path(sys.executable).with_name("vllm")), "serve", str(model)]
        command += ["--served-model-name", MODEL_NAME, "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--enforce-eager", "--dtype", "float32", *options]
        self.process = ChildProcess(command, log=log, env={**ENVIRONMENT, **environment}, start=WarmPopen)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.stop()

    def wait_until_healthy(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.exit_code is not None:
                break
            try:
                self.get("/health")
            except OSError:
                time.sleep(0.3)
            else:
                return
        raise RuntimeError("vllm serve did not start:\n" + "\n".join(self.process.last_lines(40)))

    def wait_until_it_ends(self) -> int:
        """Return the exit code of the server once it has ended by itself."""
        deadline = time.monotonic() + START_SECONDS
        while self.process.exit_code is None and time.monotonic() < deadline:
            time.sleep(0.2)
        if (code := self.process.exit_code) is None:
            raise RuntimeError("vllm serve went on:\n" + "\n".join(self.process.last_lines(40)))
        return code

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
            return str(answer.read().decode())

    def metric(self, name: str, label_value: str) -> float:
        """Sum of a metric's samples on /metrics that have a label of this value; 0 without any."""
        sample = rf'^{re.escape(name)}{{[^}}]*="{re.escape(label_value)}"[^}}]*}} (\S+)$'
        return sum(map(float, re.findall(sample, self.get("/metrics"), flags=re.MULTILINE)))

    async def transcribe(self, number: int, frames: int, *, leave_after: int | None = None) -> dict[str, Any]:
        """Hold a session of `/v1/realtime`: sound `number`, sent as a microphone would, frame by frame.

        Returns the pieces of text as they came, and what the server counted; only the pieces when the client leaves
        early, after `leave_after` of them.
        """
        import websockets

        pieces: list[str] = []
        async with (
            asyncio.timeout(ANSWER_SECONDS),
            websockets.connect(f"ws://127.0.0.1:{self.port}/v1/realtime", max_size=None) as socket_,
        ):
            assert json.loads(await socket_.recv())["type"] == "session.created"
            await _send(socket_, type="session.update", model=MODEL_NAME)
            await _send(socket_, type="input_audio_buffer.commit", final=False)
            for samples in sound(number, frames):
                audio = base64.b64encode(samples.tobytes()).decode()
                await _send(socket_, type="input_audio_buffer.append", audio=audio)
            await _send(socket_, type="input_audio_buffer.commit", final=True)
            async for message in socket_:
                event = json.loads(message)
                if event["type"] == "transcription.done":
                    return {"pieces": pieces, "text": event["text"], "usage": event["usage"]}
                assert event["type"] == "transcription.delta", event
                pieces.append(event["delta"])
                if leave_after is not None and len(pieces) >= leave_after:
                    return {"pieces": pieces}
        raise ConnectionError(f"the server closed the session after {len(pieces)} pieces")


async def _send(socket_: Any, **event: Any) -> None:
    await socket_.send(json.dumps(event))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
