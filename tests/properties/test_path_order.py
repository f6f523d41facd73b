"""Slack sharing: whoever starts when it is due ends in time, and only what is lost counts as late."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni_sched.graph.order import DEFAULT_CLASSES, PlaceReason, SlaClass, Undated
from vllm_omni_sched.graph.path_order import PathOrder, PathRequest
from vllm_omni_sched.graph.stages import Stage, StageGraph, StageKind

TWENTY = SlaClass("twenty", ttft_seconds=20.0, itl_seconds=math.inf, rank=1)


@st.composite
def graphs(draw):
    count = draw(st.integers(1, 6))
    sources = [draw(st.sets(st.integers(0, n - 1), min_size=1)) if n else set() for n in range(count)]
    return StageGraph.of(Stage(n, f"s{n}", StageKind.AR, tuple(of), final_output=True) for n, of in enumerate(sources))


costs = st.dictionaries(st.integers(0, 5), st.integers(0, 8).map(lambda quarter: quarter / 4), max_size=6)


@settings(deadline=None)
@given(graphs(), costs, st.floats(0, 1))
def test_started_when_due_it_ends_in_time_on_every_path(graph, seconds, early):
    """And earlier is as good: each stage starts at ``early`` of its way from ready to due."""
    paths = PathOrder(graph)
    slack = 20.0 - graph.longest_path_seconds(seconds, 0)
    ends = {}
    for stage_id in graph.order:
        ready = max((ends[source] for source in graph.stage(stage_id).sources), default=0.0)
        one = paths.at_stage(PathRequest("r", 0.0, seconds, TWENTY, ready=ready), stage_id)
        assert slack > 0
        assert ready - 1e-9 <= one.due <= one.latest_start + 1e-9
        ends[stage_id] = ready + early * (one.due - ready) + one.cost_seconds
    assert max(ends.values()) <= 20.0 + 1e-9


@settings(deadline=None)
@given(
    graphs(),
    st.lists(st.tuples(st.integers(-20, 20), costs, st.sampled_from(DEFAULT_CLASSES)), max_size=15),
    st.integers(0, 40),
    st.sampled_from(Undated),
)
def test_everyone_once_and_late_is_lost(graph, drawn, now, undated):
    paths = PathOrder(graph, max_wait_seconds=25, undated=undated)
    waiting = [
        PathRequest(f"r{n}", float(arrival), seconds, sla, ready=max(0.0, arrival))
        for n, (arrival, seconds, sla) in enumerate(drawn)
    ]
    placed = paths.plan(waiting, graph.order[-1], now)
    assert sorted(one.request.request_id for one in placed) == sorted(one.request_id for one in waiting)
    of = {one.request_id: one for one in waiting}
    for one in placed:
        request = of[one.request.request_id]
        left = graph.longest_path_seconds(request.costs, graph.order[-1])
        lost = now + left > request.arrival + request.sla.ttft_seconds + 1e-9
        if one.reason is not PlaceReason.AGED:
            assert (one.reason is PlaceReason.LATE) is lost
        else:
            assert now - request.arrival >= 25
    ranks = [-1 if one.reason is PlaceReason.AGED else one.request.sla.rank for one in placed]
    assert ranks == sorted(ranks)
