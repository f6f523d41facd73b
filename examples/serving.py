"""Provide what the examples share: the server that they ask, and small inputs.

Each example names the options of its server once. They start a server of a tiny model with random weights here, and
they are in the command that is printed for a real model.
"""

from __future__ import annotations

import argparse
import base64
import io
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dev.child_process import ChildProcess

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / ".models"
START_SECONDS = 600
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
TINY_OPTIONS = ("--enforce-eager", "--dtype", "float32", "--max-model-len", "4096")

start_process: Callable[..., Any] = subprocess.Popen
"""Starts the server of a tiny model, with the arguments of `subprocess.Popen`."""


@dataclass(frozen=True)
class Serving:
    """A server that an example asks.

    ``model``: a real model. ``options``: of `vllm serve`, for the real and for the tiny model. ``write_tiny``: writes
    the tiny model, and returns its folder. ``real_options``, ``tiny_options``: further options of one of them.
    ``program``: the command that serves the tiny model. ``prepare``: writes files to a folder, and returns further
    options and variables for the tiny model.
    """

    model: str
    options: Sequence[str]
    write_tiny: Callable[[], Path]
    real_options: Sequence[str] = ()
    tiny_options: Sequence[str] = TINY_OPTIONS
    program: Sequence[str] = (str(Path(sys.executable).with_name("vllm")),)
    prepare: Callable[[Path], tuple[Sequence[str], Mapping[str, str]]] = field(default=lambda folder: ((), {}))

    def command(self) -> str:
        """Return the command that serves the real model."""
        return shlex.join(["vllm", "serve", self.model, *self.options, *self.real_options])

    def parser(self, description: str | None) -> argparse.ArgumentParser:
        """Return a parser of the arguments that all examples have."""
        parser = argparse.ArgumentParser(
            description=description,
            epilog=f"Serve a real model with: {self.command()}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("--url", help="a server that runs; without it, one is started here with a tiny model")
        return parser

    @contextmanager
    def running(self, url: str | None) -> Iterator[str]:
        """Yield the URL of a server: the given one, or that of a tiny model, which is stopped afterwards.

        Raises:
            RuntimeError: the server does not start; the message has the end of its log.
        """
        if url is not None:
            yield url.rstrip("/")
            return
        print(f"A tiny model with random weights answers here. Serve a real one with:\n  {self.command()}\n")
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            url = f"http://127.0.0.1:{_free_port()}"
            command = [*self.program, "serve", str(self.write_tiny()), "--host", "127.0.0.1"]
            options, variables = self.prepare(folder)
            command += ["--port", url.rpartition(":")[2], *self.tiny_options, *self.options, *options]
            environment = {**ENVIRONMENT, **variables}
            with ChildProcess(command, log=folder / "server.log", env=environment, start=start_process) as process:
                _wait_until_healthy(url, process)
                yield url


def _wait_until_healthy(url: str, process: ChildProcess) -> None:
    deadline = time.monotonic() + START_SECONDS
    while process.exit_code is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.3)
    raise RuntimeError("the server did not start:\n" + "\n".join(process.last_lines(40)))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def tiny(name: str) -> Callable[[], Path]:
    """Return a function that writes a tiny model of `dev.tiny_models` and returns its folder.

    A process of its own writes it: what that imports is no part of a client.
    """

    def write() -> Path:
        folder = MODELS / name
        subprocess.run(
            [sys.executable, "-m", "dev.tiny_models", name, "--out", str(folder)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            check=True,
            stdout=subprocess.DEVNULL,
        )
        return folder

    return write


def data_url(kind: str, content: bytes) -> str:
    """Return content as a URL that a request may have in place of an address; ``kind``: such as "image/png"."""
    return f"data:{kind};base64," + base64.b64encode(content).decode()


def plain_picture(color: str) -> bytes:
    """Return a PNG of one colour."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (64, 48), color).save(file, "PNG")
    return file.getvalue()


def client_of(url: str) -> Any:
    """Return an asynchronous client of the OpenAI API."""
    import openai

    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=300, max_retries=0)
