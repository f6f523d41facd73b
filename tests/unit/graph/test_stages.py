"""The stage graph: what it answers, and what it refuses by name."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.graph.stages import GraphError, Stage, StageGraph, StageKind

NAMES = ("thinker", "talker", "vocoder", "image", "mixer")


def stage(stage_id, *sources, final=False, name=None):
    return Stage(stage_id, name or NAMES[stage_id], StageKind.AR, sources, final_output=final)


LINE = StageGraph.of([stage(2, 1, final=True), stage(0), stage(1, 0)])
DIAMOND = StageGraph.of([stage(0, final=True), stage(1, 0), stage(3, 0), stage(2, 1), stage(4, 3, 2, final=True)])


def test_a_line():
    assert LINE.order == (0, 1, 2)
    assert LINE.entries == (0,)
    assert LINE.remaining(1) == (1, 2)
    assert LINE.stage(1).name == "talker"


def test_a_diamond():
    assert DIAMOND.order == (0, 1, 2, 3, 4)
    assert DIAMOND.successors(0) == (1, 3)
    assert DIAMOND.remaining(3) == (3, 4)


def test_ties_in_the_order_go_by_id_and_not_by_depth():
    graph = StageGraph.of([stage(0, 4), stage(1), stage(2, 1, 0, final=True), stage(3, 1, final=True), stage(4)])
    assert graph.order == (1, 3, 4, 0, 2)
    assert graph.entries == (1, 4)


def test_the_costliest_path_counts():
    costs = {0: 1.0, 1: 0.5, 2: 0.5, 3: 3.0, 4: 0.25}
    assert DIAMOND.longest_path_seconds(costs, 0) == 4.25
    assert DIAMOND.longest_path_seconds(costs, 1) == 1.25
    assert DIAMOND.longest_path_seconds({1: 2.0, 3: 1.0}, 0) == 2.0  # it goes nowhere else


@pytest.mark.parametrize(
    ("stages", "entries", "message"),
    [
        ([stage(1), stage(1, name="other")], None, "two stages have the id 1: talker and other"),
        ([stage(0), stage(1, 7, final=True)], None, r"talker \(1\) reads stage 7, which does not exist"),
        ([stage(0), stage(1, 1)], None, r"cycle: talker \(1\) -> talker \(1\)"),
        ([stage(0), stage(1, 0, 2), stage(2, 1)], None, r"cycle: talker \(1\) -> vocoder \(2\) -> talker \(1\)"),
        ([stage(1, 3), stage(3, 2), stage(2, 1)], None, r"talker \(1\) -> vocoder \(2\) -> image \(3\) -> talker"),
        ([], None, "no entry"),
        ([stage(0, final=True)], (), "no entry"),
        ([stage(0, final=True)], (0, 5), r"entry 5 is not a stage; known stages are thinker \(0\)"),
        ([stage(0), stage(1, 0)], None, "no final output: set final_output"),
        (
            [stage(0, final=True), stage(1), stage(2, 1, final=True)],
            (0,),
            r"unreachable from the entries thinker \(0\): talker \(1\), vocoder \(2\)",
        ),
        ([stage(0, final=True), stage(1, 0)], None, r"no final output depends on talker \(1\)"),
    ],
)
def test_refused_by_name(stages, entries, message):
    with pytest.raises(GraphError, match=message) as raised:
        StageGraph.of(stages, entries)
    assert isinstance(raised.value, ConfigError)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage_id": -1}, "stage_id must be"),
        ({"replicas": 0}, r"a \(0\): replicas must be 1 or more"),
        ({"sources": (1, 1)}, r"a \(0\): sources names a stage twice"),
    ],
)
def test_a_stage_checks_itself(options, message):
    with pytest.raises(GraphError, match=message):
        Stage(**{"stage_id": 0, "name": "a", "kind": StageKind.DIFFUSION, **options})


@pytest.mark.parametrize("ask", ["stage", "successors", "remaining"])
def test_asking_for_a_stage_that_is_not_there(ask):
    with pytest.raises(ValueError, match=r"no stage 9; there are thinker \(0\), talker \(1\)"):
        getattr(LINE, ask)(9)


@st.composite
def graphs(draw):
    count = draw(st.integers(1, 8))
    names = draw(st.permutations(range(count)))  # so that ids are not in the order of the data
    sources = [draw(st.sets(st.sampled_from(names[:place]))) if place else () for place in range(count)]
    return [
        Stage(one, f"s{one}", StageKind.AR, tuple(of), final_output=True)
        for one, of in zip(names, sources, strict=True)
    ]


@settings(deadline=None)
@given(graphs(), st.lists(st.integers(0, 9), min_size=8, max_size=8))
def test_any_acyclic_graph(stages, seconds):
    graph = StageGraph.of(stages)
    place = {stage_id: at for at, stage_id in enumerate(graph.order)}
    assert len(place) == len(stages)
    assert all(place[source] < place[one.stage_id] for one in stages for source in one.sources)
    costs = dict(enumerate(map(float, seconds)))

    def walk(stage_id):
        paths = [[stage_id, *path] for after in graph.successors(stage_id) for path in walk(after)]
        return paths or [[stage_id]]

    for one in graph.order:
        paths = walk(one)
        assert graph.longest_path_seconds(costs, one) == max(math.fsum(costs[s] for s in path) for path in paths)
        assert set(graph.remaining(one)) == {s for path in paths for s in path}
