"""A real Prometheus for a test: on a free loopback port, scraping one page each second."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

CONFIG = """
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
  - job_name: stages
    static_configs: [{{targets: ["127.0.0.1:{port}"], labels: {{instance: "a:8000"}}}}]
"""


def binary() -> str | None:
    """Return the binary that PROMETHEUS names, that of this environment, or the one on PATH."""
    return os.environ.get("PROMETHEUS") or tool("prometheus")


def tool(name: str) -> str | None:
    """Return a binary of this environment, or the one on PATH."""
    return shutil.which(name, path=os.pathsep.join([str(Path(sys.prefix) / "bin"), os.environ.get("PATH", "")]))


@contextlib.contextmanager
def prometheus(command: str, folder: Path, scraped_port: int) -> Iterator[str]:
    """Run it with its data in `folder`; gives its address.

    Raises:
        RuntimeError: it has ended, or does not answer within 30 seconds; the message holds what it wrote.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config, log = folder / "prometheus.yml", folder / "prometheus.log"
    config.write_text(CONFIG.format(port=scraped_port))
    data = f"--storage.tsdb.path={folder / 'data'}"
    arguments = [f"--config.file={config}", data, f"--web.listen-address=127.0.0.1:{port}"]
    with log.open("wb") as written:
        process = subprocess.Popen([command, *arguments], stdout=written, stderr=written, stdin=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(process, url, log)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError, urllib.error.URLError), urllib.request.urlopen(f"{url}/-/ready", timeout=2):
            return
        time.sleep(0.1)
    raise RuntimeError(f"Prometheus does not answer (exit status {process.poll()}): {log.read_text()[-2000:]}")
