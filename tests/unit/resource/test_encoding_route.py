"""Rules of the choice of an engine by where a request's encodings are."""

from __future__ import annotations

import pytest

from vllm_omni_sched.resource.engine.encoding_route import EncodingRoute, EngineView, Route, RouteReason


@pytest.mark.parametrize(
    ("engines", "engine", "reason"),
    [
        # (requests, warm) of each engine
        ([(0, 0.0), (3, 1.0)], 1, RouteReason.HELD),
        ([(0, 0.0), (4, 1.0)], 1, RouteReason.HELD),  # as many more as it may have
        ([(0, 0.0), (5, 1.0)], None, RouteReason.BUSY),
        ([(2, 0.0), (6, 1.0), (9, 0.0)], 1, RouteReason.HELD),
        ([(1, 0.2), (3, 0.8)], 1, RouteReason.HELD),  # the one that has most
        ([(1, 0.2), (6, 0.8)], 0, RouteReason.HELD),  # of those that may be preferred
        ([(3, 0.5), (1, 0.5)], 1, RouteReason.HELD),  # then the one with fewer requests
        ([(2, 0.5), (2, 0.5)], 0, RouteReason.HELD),  # then the first
        ([(0, 0.0), (0, 0.0)], None, RouteReason.UNKNOWN),
        ([], None, RouteReason.UNKNOWN),
    ],
)
def test_the_engine_that_has_most_is_preferred_unless_it_is_busy(
    engines: list[tuple[float, float]], engine: int | None, reason: RouteReason
) -> None:
    assert EncodingRoute(4).choose([EngineView(*one) for one in engines]) == Route(engine, reason)


def test_without_extra_requests_only_the_least_busy_engines_are_preferred() -> None:
    assert EncodingRoute(0).choose([EngineView(1, 1.0), EngineView(1, 0.0)]).engine == 0
    assert EncodingRoute(0).choose([EngineView(2, 1.0), EngineView(1, 0.0)]).reason is RouteReason.BUSY


def test_what_nobody_is_known_to_have_goes_home_unless_that_is_busy() -> None:
    route = EncodingRoute(4)
    assert route.choose([EngineView(0, 0.0), EngineView(4, 0.0)], home=1) == Route(1, RouteReason.HOME)
    assert route.choose([EngineView(0, 0.0), EngineView(5, 0.0)], home=1) == Route(None, RouteReason.UNKNOWN)
    assert route.choose([EngineView(0, 0.1), EngineView(0, 0.0)], home=1) == Route(0, RouteReason.HELD)
