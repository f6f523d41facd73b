"""Routing by encodings: no engine gets far ahead of another one, and none is left without requests."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni_sched.graph.affinity import AffinityBook
from vllm_omni_sched.resource.engine.encoding_route import EncodingRoute, EngineView, RouteReason

ITEMS = st.lists(st.sampled_from("abcde"), min_size=1, max_size=3, unique=True)


class Cluster:
    """Engines behind the policy, and vLLM's choice where the policy has none: the engine with the fewest requests."""

    def __init__(self, engines: int, extra: int, *, homes: bool = False) -> None:
        self.policy, self.book, self.homes = EncodingRoute(extra), AffinityBook[int](), homes
        self.requests = [0] * engines

    def send(self, items: list[str]) -> tuple[int, RouteReason]:
        warm = self.book.warm(items, range(len(self.requests)))
        home = ord(items[0]) % len(self.requests) if self.homes else None
        route = self.policy.choose([EngineView(one, warm[at]) for at, one in enumerate(self.requests)], home)
        engine = self.requests.index(min(self.requests)) if route.engine is None else route.engine
        self.requests[engine] += 1
        self.book.note(engine, items)
        return engine, route.reason


@given(st.integers(2, 6), st.integers(0, 8), st.booleans(), st.lists(st.one_of(ITEMS, st.integers(0, 5)), max_size=120))
@settings(deadline=None)
def test_no_engine_is_preferred_far_ahead_of_the_least_busy_one(engines, extra, homes, events) -> None:  # type: ignore[no-untyped-def]
    cluster = Cluster(engines, extra, homes=homes)
    for event in events:
        if isinstance(event, int):  # a request of that engine has ended
            at = event % engines
            cluster.requests[at] = max(0, cluster.requests[at] - 1)
            continue
        least = min(cluster.requests)
        engine, reason = cluster.send(event)
        if reason in (RouteReason.HELD, RouteReason.HOME):
            assert cluster.requests[engine] <= least + extra + 1
        else:
            assert cluster.requests[engine] == least + 1


@given(st.integers(2, 6), st.integers(0, 8), st.booleans(), st.lists(ITEMS, min_size=1, max_size=4))
@settings(deadline=None)
def test_no_engine_is_left_without_requests(engines, extra, homes, pattern) -> None:  # type: ignore[no-untyped-def]
    """Whatever arrives, if nothing ends: all engines have requests after so many."""
    cluster = Cluster(engines, extra, homes=homes)
    for number in range(engines * (extra + 1) + 1):
        cluster.send(pattern[number % len(pattern)])
    assert min(cluster.requests) > 0
    assert max(cluster.requests) - min(cluster.requests) <= extra + 1


@given(st.lists(ITEMS, min_size=1, max_size=30))
@settings(deadline=None)
def test_requests_that_end_before_the_next_one_comes_go_where_their_items_are(sent) -> None:  # type: ignore[no-untyped-def]
    cluster, at = Cluster(4, 2), dict[str, set[int]]()
    for items in sent:
        engine, reason = cluster.send(items)
        known = {one for item in items for one in at.get(item, ())}
        assert (reason is RouteReason.HELD) == bool(known)
        assert not known or engine in known
        for item in items:
            at.setdefault(item, set()).add(engine)
        cluster.requests[engine] -= 1
