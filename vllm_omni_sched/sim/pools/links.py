"""Model the transfers between stages."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_omni_sched.connectors.base import Edge
from vllm_omni_sched.connectors.routing.learnt import Learnt
from vllm_omni_sched.connectors.routing.options import RoutingOptions
from vllm_omni_sched.connectors.routing.route import route
from vllm_omni_sched.errors import ConfigError
from vllm_omni_sched.sim.kernel import Simulator
from vllm_omni_sched.sim.pools.trip import Trip
from vllm_omni_sched.sim.work import Request


@dataclass(frozen=True)
class LinkSpec:
    """A link: a network card, a bus, shared memory. ``distance``: 0 within a host, larger the farther apart its ends.

    Raises:
        ConfigError: a number is out of its range.
    """

    name: str
    bytes_per_second: float
    latency_seconds: float = 0.0
    distance: int = 0

    def __post_init__(self) -> None:
        if not self.bytes_per_second > 0 or not 0 <= self.latency_seconds < float("inf"):
            raise ConfigError(
                f"link {self.name}: bytes_per_second must be above 0 and latency_seconds 0 or more, "
                f"got {self.bytes_per_second} and {self.latency_seconds}"
            )


def embeds_bytes(hidden: int, bytes_each: int = 2) -> Callable[[Request], int]:
    """Return a function for the bytes of a request's encoder embeddings with that many dimensions."""

    def count(request: Request) -> int:
        return sum(item.embeds for item in request.items) * hidden * bytes_each

    return count


class Link:
    """A link that sends messages first come first served.

    Each takes ``bytes / bandwidth``, and arrives a latency later.
    """

    __slots__ = ("_free_at", "_sim", "busy_seconds", "spec")

    def __init__(self, sim: Simulator, spec: LinkSpec) -> None:
        self._sim, self.spec = sim, spec
        self._free_at = 0.0
        self.busy_seconds = 0.0

    def send(self, nbytes: int, action: Callable[[Any], None], argument: Any) -> None:
        """Call ``action(argument)`` when the bytes have arrived."""
        seconds = nbytes / self.spec.bytes_per_second
        self.busy_seconds += seconds
        self._free_at = max(self._free_at, self._sim.now) + seconds
        self._sim.at(self._free_at + self.spec.latency_seconds, action, argument)


class Links:
    """The links of one edge: each replica of the source has its own link of each kind.

    With one kind, all messages take it. With several, the real `route` chooses by what `Learnt` has observed on
    this edge, as the connector of the plugin does.
    """

    def __init__(
        self,
        sim: Simulator,
        specs: tuple[LinkSpec, ...],
        bytes_of: Callable[[Request], int],
        edge: Edge = Edge("0", "1"),  # noqa: B008 (a tuple)
        options: RoutingOptions | None = None,
    ) -> None:
        if len({spec.name for spec in specs}) < len(specs) or not specs:
            raise ConfigError(f"links of an edge: one or more with different names, got {[one.name for one in specs]}")
        self._sim, self._specs, self._bytes_of, self._edge = sim, {spec.name: spec for spec in specs}, bytes_of, edge
        self.learnt = Learnt({spec.name: spec.distance for spec in specs}, options or RoutingOptions())
        self._links: dict[tuple[str, int], Link] = {}
        self.messages = dict.fromkeys(self._specs, 0)

    def send(self, trip: Trip, source: int, arrived: Callable[[Trip], None]) -> None:
        """Send the output of a replica for a request."""
        sim, nbytes = self._sim, self._bytes_of(trip.request)
        if len(self._specs) == 1:
            (name,) = self._specs
            self.messages[name] += 1
            self._link(name, source).send(nbytes, arrived, trip)
            return
        names = list(self._specs)
        first = route(self.learnt.states(self._edge, nbytes, names, here=True, now=sim.now))[0]
        self.messages[first.path] += 1
        began = sim.now

        def there(trip: Trip) -> None:
            seconds = sim.now - began
            self.learnt.took(self._edge, first.path, nbytes, first.reason, seconds, names)
            self.learnt.got(self._edge, first.path, nbytes, 0.0)
            arrived(trip)

        self._link(first.path, source).send(nbytes, there, trip)

    def _link(self, name: str, source: int) -> Link:
        link = self._links.get((name, source))
        if link is None:
            link = self._links[name, source] = Link(self._sim, self._specs[name])
        return link

    def busy_seconds(self) -> Mapping[str, float]:
        """Return the busy seconds of all links by kind."""
        total = dict.fromkeys(self._specs, 0.0)
        for (name, _), link in self._links.items():
            total[name] += link.busy_seconds
        return total
