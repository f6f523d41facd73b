"""Choose the engine of a request by where its encodings are, among the engines of one server."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class RouteReason(str, Enum):
    """Reason for the choice of an engine; also the label of a metric."""

    HELD = "held"  # it has most of the request's encodings, or makes them
    BUSY = "busy"  # those that have some have too many requests: left to vLLM
    HOME = "home"  # no engine is known to have any, and this one is where all front ends send them
    UNKNOWN = "unknown"  # no engine is known to have any: left to vLLM
    NO_ITEMS = "no_items"  # the request needs none: left to vLLM
    NAMED = "named"  # the client has named the engine, or a rule of vLLM does


@dataclass(frozen=True)
class EngineView:
    """An engine: how many requests it has, and the fraction of a request's encodings that it has, in [0, 1]."""

    requests: float
    warm: float


@dataclass(frozen=True)
class Route:
    """The index of the engine, None if vLLM chooses, and the reason."""

    engine: int | None
    reason: RouteReason


class EncodingRoute:
    """Prefers the engine that has most of a request's encodings, unless it has too many requests.

    1. An engine that has any of them is preferred while it has at most ``extra_requests`` more requests than the engine
       that has fewest.
    2. Of several, the one that has most; then the one with fewer requests; then the first.
    3. If none is known to have any, an engine that is given as their home is preferred in the same way: front ends that
       do not know of each other agree on it.
    4. Otherwise vLLM chooses, which takes the engine with the fewest requests.

    So no engine gets more than ``extra_requests`` + 1 requests ahead of another one by this choice, and one that has
    none gets a request before others have more than that, whatever they hold.

    Args:
        extra_requests: see rule 1; 0 or more.
    """

    def __init__(self, extra_requests: int) -> None:
        self.extra_requests = extra_requests

    def choose(self, engines: Sequence[EngineView], home: int | None = None) -> Route:
        """Return the engine for a request that needs encodings.

        Args:
            engines: all engines.
            home: index of the engine of rule 3, if there is to be one.
        """
        holding = [(index, one) for index, one in enumerate(engines) if one.warm > 0]
        most = min((one.requests for one in engines), default=0.0) + self.extra_requests
        if not holding:
            if home is not None and engines[home].requests <= most:
                return Route(home, RouteReason.HOME)
            return Route(None, RouteReason.UNKNOWN)
        eligible = [(-one.warm, one.requests, index) for index, one in holding if one.requests <= most]
        if not eligible:
            return Route(None, RouteReason.BUSY)
        return Route(min(eligible)[-1], RouteReason.HELD)
