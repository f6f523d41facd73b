"""Routing of requests to the engines of one server with data parallelism, by where their encodings are.

vLLM's client of several engine cores picks one for each request. Its method is wrapped: an engine is named in
``data_parallel_rank``, as a client may do, and vLLM's own method does the rest.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

from vllm_omni_sched import compat
from vllm_omni_sched.config.errors import MissingSymbolError
from vllm_omni_sched.engine.fitted import engine_options
from vllm_omni_sched.engine.metrics.front_end import FrontEndMetric, FrontEndMetrics
from vllm_omni_sched.engine.named import uses_our_scheduler
from vllm_omni_sched.graph.affinity import AffinityBook
from vllm_omni_sched.imports import wrap_once
from vllm_omni_sched.logs import get_logger
from vllm_omni_sched.resource.engine.encoding_route import EncodingRoute, EngineView, RouteReason

logger = get_logger(__name__)

OPTION = "route_by_encodings"
_ROUTER = "omni_sched_router"
_METHOD = "get_core_engine_for_request"

ROUTE_METRICS = (
    FrontEndMetric(
        "routed_requests_total",
        "counter",
        "Requests with `route_by_encodings` by the reason for the choice of their engine: it has most of their "
        "encodings (held); those that have some have too many requests (busy); none is known to have any, and several "
        "API servers agree on one (home), or vLLM chooses (unknown); they need none (no_items); or the client or a "
        "rule of vLLM names the engine (named).",
        "reason",
        tuple(one.value for one in RouteReason),
    ),
)


class RouteMetrics(FrontEndMetrics):
    """Counts routed requests."""

    def __init__(self) -> None:
        super().__init__(ROUTE_METRICS)

    def routed(self, reason: RouteReason) -> None:
        """Count a request."""
        self._metrics["routed_requests_total"].labels(reason.value).inc()


_metrics: RouteMetrics | None = None


def attach_routing(vllm_config: Any) -> None:
    """Let the clients of several engine cores in this process prefer engines that have a request's encodings.

    Raises:
        MissingSymbolError: this vLLM has no such client.
    """
    if vllm_config.parallel_config.data_parallel_size == 1 or not vllm_config.model_config.is_multimodal_model:
        logger.info("Option %s has no effect: the server has one engine, or a model that takes text alone.", OPTION)
        return
    client = compat.find(compat.CORE_CLIENT, "DPLBAsyncMPClient")
    if client is None or not hasattr(client, _METHOD):
        raise MissingSymbolError(
            f"option {OPTION!r} cannot work: vLLM {compat.vllm_version()} has no DPLBAsyncMPClient.{_METHOD}. Leave it "
            "out"
        )
    wrap_once(client, _METHOD, _routes)


class Router:
    """Routes the requests of one client of several engine cores.

    It knows what this client has sent to which engine, and neither what other API servers have sent nor what an engine
    has evicted since. With several API servers, items that are not known have a home by their hash.
    """

    def __init__(self, extra_requests: int, routed: Callable[[RouteReason], None]) -> None:
        self._route, self._routed = EncodingRoute(extra_requests), routed
        self._sent = AffinityBook[int]()

    def engine_for(self, client: Any, request: Any, original: Callable[[Any, Any], Any]) -> Any:
        """Return the engine that ``original``, vLLM's method, returns for the request, whose engine may be named."""
        keys = {one.identifier: max(1, one.mm_position.length) for one in request.mm_features or ()}
        named = (
            request.data_parallel_rank is not None
            or request.request_id in client.reqs_in_flight  # a further part of a session
            or request.pooling_params is not None  # vLLM sends those that belong together to one engine
        )
        index, reason = None, RouteReason.NAMED if named else RouteReason.NO_ITEMS
        if keys and not named:
            warm = self._sent.warm(keys, range(len(client.lb_engines)))
            loads = [_requests_of(client, one) for one in warm]
            home = _home_of(keys, len(loads)) if client.client_count > 1 else None
            chosen = self._route.choose([EngineView(load, warm[one]) for one, load in enumerate(loads)], home)
            index, reason = chosen.engine, chosen.reason
        self._routed(reason)
        if index is None:
            engine = original(client, request)
        else:
            request.data_parallel_rank = index
            try:
                engine = original(client, request)
            finally:
                request.data_parallel_rank = None
            client.lb_engines[index][0] += client.client_count  # vLLM does so for an engine that it has chosen
        if keys:
            for key, embeds in keys.items():
                self._sent.note(client.core_engines.index(engine), [key], embeds)
        return engine


def _home_of(keys: Mapping[str, int], engines: int) -> int:
    """Return the engine to which all front ends send these items if they know no other: by the hash of the largest."""
    largest = max(keys, key=lambda key: (keys[key], key))
    return zlib.crc32(largest.encode()) % engines


def _requests_of(client: Any, index: int) -> float:
    """Return how many requests an engine has, as vLLM estimates it."""
    waiting, running, *_ = client.lb_engines[index]
    own = client.engine_inflight[client.core_engines[index]] if hasattr(client, "engine_inflight") else 0
    return float(max(client.client_count * own, waiting + running))


def _routes(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def wrapper(self: Any, request: Any) -> Any:
        router = _router_of(self)
        return original(self, request) if router is None else router.engine_for(self, request, original)

    return wrapper


def _router_of(client: Any) -> Router | None:
    """Return the router of a client, which is made with its first request; None if the option is off for it."""
    if not hasattr(client, _ROUTER):
        router = None
        if uses_our_scheduler(client.vllm_config):
            options = engine_options(client.vllm_config)
            if options.route_by_encodings:
                routed = _metrics_of_process().routed if options.metrics else _ignore
                router = Router(options.route_extra_requests, routed)
        setattr(client, _ROUTER, router)
    found: Router | None = getattr(client, _ROUTER)
    return found


def _ignore(reason: RouteReason) -> None:
    pass


def _metrics_of_process() -> RouteMetrics:
    global _metrics
    if _metrics is None:
        _metrics = RouteMetrics()
        _metrics.attach()
    return _metrics
