"""`make serve`: a real `vllm serve` with our scheduler, asked two questions, its metrics shown.

Environment: PORT (default: a free one), PROFILE (a profile of this package, such as chat), ONESHOT=1 (stop after the
demonstration), SCHEDULER_CLS (another scheduler class; empty for vLLM's own).
"""

from __future__ import annotations

import base64
import io
import json
import os
import re
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import httpx
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from dev.child_process import ChildProcess

ROOT = Path(__file__).resolve().parent.parent
LOG = ROOT / ".logs" / "serve.log"
MODEL_NAME = "tiny-llava"
OUR_SCHEDULER = "vllm_omni_sched.OmniScheduler"
OUR_METRICS = "vllm:omni_sched"
START_SECONDS = 300
METRICS_SECONDS = 3  # what the engine counts is on /metrics a second later, two on a busy machine

console = Console(highlight=False, width=None if sys.stdout.isatty() else 100)


class ServeError(Exception):
    """Raised with one line that says what went wrong."""


@dataclass(frozen=True)
class Options:
    port: int
    oneshot: bool
    scheduler_cls: str
    profile: str = ""

    @classmethod
    def from_environment(cls) -> Options:
        port = os.environ.get("PORT", "")
        if port and not (port.isdecimal() and 0 < int(port) < 65_536):
            raise ServeError(f"PORT={port} is not a port number")
        return cls(
            port=int(port) if port else _free_port(),
            oneshot=os.environ.get("ONESHOT", "") not in ("", "0"),
            scheduler_cls=os.environ.get("SCHEDULER_CLS", OUR_SCHEDULER),
            profile=os.environ.get("PROFILE", ""),
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def command(self, model: Path) -> list[str]:
        vllm = Path(sys.executable).with_name("vllm")
        command = [str(vllm), "serve", str(model), "--served-model-name", MODEL_NAME]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--enforce-eager", "--dtype", "float32", "--max-model-len", "4096"]
        command += ["--limit-mm-per-prompt", '{"image": 8}']
        if self.scheduler_cls:
            command += ["--scheduler-cls", self.scheduler_cls]
        if self.profile:
            command += ["--additional-config", json.dumps({"omni_sched": self.profile})]
        return command


def main() -> int:
    signal.signal(signal.SIGTERM, _stop_like_ctrl_c)
    started = time.monotonic()
    server = None
    try:
        options = Options.from_environment()
        model = _write_model()
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "NO_COLOR": "1",
        }
        with ChildProcess(options.command(model), log=LOG, env=environment) as server:
            _wait_until_healthy(server, options)
            _demonstrate(options)
            metrics = _show_metrics(options)
            if options.oneshot:
                if not metrics and options.scheduler_cls == OUR_SCHEDULER:
                    raise ServeError(f"the server answers, but its /metrics has no {OUR_METRICS}_*")
            else:
                _serve_until_interrupted(server, options)
    except ServeError as error:
        if server is not None:
            console.print(Panel(Text("\n".join(server.last_lines(25))), title=f"end of {LOG.relative_to(ROOT)}"))
        console.print("[bold red]make serve: failed[/] ", Text(str(error)), soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print(f"\nmake serve: stopped after {time.monotonic() - started:.0f} s")
        return 0
    scheduler = options.scheduler_cls or "vLLM's own scheduler"
    seconds = time.monotonic() - started
    console.print(
        f"[bold green]make serve: OK[/]  text and two images answered with {scheduler}, "
        f"{metrics} metrics of ours, stopped after {seconds:.0f} s",
        soft_wrap=True,
    )
    return 0


def _write_model() -> Path:
    console.print("[1/4] writing the tiny multimodal model")
    from dev.tiny_models import write_llava

    return write_llava(ROOT / ".models" / "llava")


def _wait_until_healthy(server: ChildProcess, options: Options) -> None:
    scheduler = options.scheduler_cls or "its own scheduler"
    console.print(
        f"[2/4] starting vllm serve with {scheduler} (about 45 s; log in {LOG.relative_to(ROOT)})",
        soft_wrap=True,
    )
    started = reported = time.monotonic()
    with console.status("") as status:
        while True:
            seconds = time.monotonic() - started
            if server.exit_code is not None:
                raise ServeError(f"vllm serve ended by itself: {_cause(server)}")
            if seconds > START_SECONDS:
                raise ServeError(f"vllm serve is not healthy after {START_SECONDS} s")
            if _is_healthy(options):
                break
            status.update(f"{seconds:.0f} s  {_latest_message(server)}")
            if not console.is_terminal and time.monotonic() - reported >= 10:
                reported = time.monotonic()
                console.print(f"      {seconds:.0f} s  {_latest_message(server)}", soft_wrap=True)
            time.sleep(0.5)
    console.print(f"      healthy after {time.monotonic() - started:.0f} s at {options.url}/v1")


def _is_healthy(options: Options) -> bool:
    try:
        return httpx.get(f"{options.url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def _latest_message(server: ChildProcess) -> str:
    """Return vLLM's last log message, without process, date and file."""
    for line in reversed(server.last_lines(20)):
        if " INFO " in line and "] " in line:
            return line.split("] ", 1)[1][:90].replace("[", r"\[")
    return "loading Python modules"


def _cause(server: ChildProcess) -> str:
    """Return the last error in vLLM's log that is not about another process having failed."""
    errors = (re.search(r"\b(?:[A-Za-z_]\w*\.)*[A-Z]\w*Error: .+", line) for line in server.last_lines(2000))
    causes = [error[0] for error in errors if error and "Engine core initialization failed" not in error[0]]
    return causes[-1] if causes else f"exit code {server.exit_code}"


def _demonstrate(options: Options) -> None:
    console.print(
        "[3/4] asking it, through the OpenAI API (its weights are random, so its words are made up)", soft_wrap=True
    )
    images = [_image_url(color) for color in ("crimson", "steelblue")]
    _ask(options, "text", "Say something.")
    _ask(
        options,
        "text and two images",
        [
            *({"type": "image_url", "image_url": {"url": url}} for url in images),
            {"type": "text", "text": "Which of the two is warmer?"},
        ],
    )


def _ask(options: Options, title: str, content: Any) -> None:
    import openai

    started = time.monotonic()
    try:
        with openai.OpenAI(base_url=f"{options.url}/v1", api_key="none", timeout=120, max_retries=0) as client:
            answer = client.chat.completions.create(
                model=MODEL_NAME,
                messages=[{"role": "user", "content": content}],
                max_tokens=24,
                temperature=0,
                extra_body={"ignore_eos": True},
            )
    except openai.OpenAIError as error:
        raise ServeError(f"the request with {title} failed: {error}") from error
    seconds = time.monotonic() - started
    text = answer.choices[0].message.content or ""
    if not text.strip() or answer.usage is None:
        raise ServeError(f"the answer to the request with {title} is empty")
    tokens = f"{answer.usage.prompt_tokens} tokens in, {answer.usage.completion_tokens} out, {seconds * 1e3:.0f} ms"
    console.print(Panel(Text(text.strip()), title=title, subtitle=tokens))


def _image_url(color: str) -> str:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (64, 48), color).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _show_metrics(options: Options) -> int:
    """Print our metrics that are not 0, a histogram as its count and sum; returns how many metrics there are."""
    from prometheus_client.parser import text_string_to_metric_families

    console.print(f"[4/4] reading our metrics from {options.url}/metrics")
    time.sleep(METRICS_SECONDS)
    families = text_string_to_metric_families(httpx.get(f"{options.url}/metrics", timeout=10).text)
    ours = [family for family in families if family.name.startswith(OUR_METRICS)]
    table = Table("metric", "labels", "value")
    table.columns[2].justify = "right"
    table.columns[0].no_wrap = table.columns[2].no_wrap = True
    zero = 0
    for family in ours:
        for sample in family.samples:
            if sample.name.endswith(("_bucket", "_created")):
                continue
            zero += not sample.value
            if sample.value:
                constant = ("engine", "model_name")
                labels = ", ".join(f"{key}={value}" for key, value in sample.labels.items() if key not in constant)
                table.add_row(sample.name, labels, f"{sample.value:g}")
    if ours:
        console.print(table)
        console.print(f"      and {zero} values that are 0 so far")
    else:
        console.print(f"      none: no name there starts with {OUR_METRICS}")
    return len(ours)


def _serve_until_interrupted(server: ChildProcess, options: Options) -> NoReturn:
    console.print(f"serving [bold]{MODEL_NAME}[/] at {options.url}/v1, Ctrl-C to stop")
    while server.exit_code is None:
        time.sleep(0.5)
    raise ServeError(f"vllm serve ended by itself: {_cause(server)}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _stop_like_ctrl_c(*_: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
