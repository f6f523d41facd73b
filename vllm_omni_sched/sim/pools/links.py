"""Model the transfers between stages."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.kernel import Simulator
from vllm_omni_sched.sim.pools.request_run import RequestRun
from vllm_omni_sched.sim.work import Request


@dataclass(frozen=True)
class LinkSpec:
    """Describes what carries bytes between stages, such as a network card, a bus or shared memory.

    Raises:
        ConfigError: a number is out of its range.
    """

    name: str
    bytes_per_second: float
    latency_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.bytes_per_second > 0 or not 0 <= self.latency_seconds < float("inf"):
            raise ConfigError(
                f"link {self.name}: bytes_per_second must be above 0 and latency_seconds 0 or more, "
                f"got {self.bytes_per_second} and {self.latency_seconds}"
            )


class Link:
    """Sends messages first come first served.

    Each takes ``bytes / bandwidth``, and arrives a latency later.
    """

    __slots__ = ("_free_at", "_sim", "_spec")

    def __init__(self, sim: Simulator, spec: LinkSpec) -> None:
        self._sim, self._spec = sim, spec
        self._free_at = 0.0

    def send(self, nbytes: int, action: Callable[[Any], None], argument: Any) -> None:
        """Have ``action(argument)`` happen when they are there."""
        seconds = nbytes / self._spec.bytes_per_second
        self._free_at = max(self._free_at, self._sim.now) + seconds
        self._sim.at(self._free_at + self._spec.latency_seconds, action, argument)


class Links:
    """Holds the links of one edge: each replica of the source has its own."""

    def __init__(self, sim: Simulator, spec: LinkSpec, bytes_of: Callable[[Request], int]) -> None:
        self._sim, self._spec, self._bytes_of = sim, spec, bytes_of
        self._links: dict[int, Link] = {}

    def send(self, run: RequestRun, source: int, arrived: Callable[[RequestRun], None]) -> None:
        """Send what a replica has made for a request."""
        link = self._links.get(source)
        if link is None:
            link = self._links[source] = Link(self._sim, self._spec)
        link.send(self._bytes_of(run.request), arrived, run)
