"""Read the metrics of a running vLLM server for commands."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import urlopen

from vllm_omni_sched.config.errors import ConfigError

if TYPE_CHECKING:
    from vllm_omni_sched.sim.workloads.recorder import Scrape

_TIMEOUT_SECONDS = 10.0


def metrics_address(url: str) -> str:
    """Return the address of a server's metrics; a bare address gets the path /metrics.

    Raises:
        ConfigError: it is no address.
    """
    try:
        parts = urlsplit(url)
        found = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
    except ValueError:  # no port, or no address in brackets
        found = False
    if not found:
        raise ConfigError(f"URL must be like http://localhost:8000, got {url!r}")
    path = parts.path.rstrip("/")
    path = path if path.endswith("/metrics") else path + "/metrics"
    return parts._replace(path=path, fragment="").geturl()


def look(address: str) -> Scrape:
    """Return the load metrics at an address.

    Raises:
        OSError, HTTPException: there is no answer.
        ConfigError: it is no page of a vLLM server.
    """
    from vllm_omni_sched.sim.workloads.recorder import read_metrics

    try:
        with urlopen(address, timeout=_TIMEOUT_SECONDS) as answer:
            return read_metrics(answer.read().decode("utf-8", "replace"))
    except HTTPError as error:
        error.close()  # the error holds the open response
        raise


def why(error: Exception) -> str:
    """Return why there is no answer, in words."""
    if isinstance(error, HTTPError):
        return f"it answers {error.code} {error.reason}; are its metrics on?"
    reason = getattr(error, "reason", None) or error
    return str(getattr(reason, "strerror", None) or reason) or type(error).__name__
