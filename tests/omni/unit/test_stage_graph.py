"""vLLM-Omni's pipeline as our graph."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from tests.support.omni_stages import DIFFUSION, FINAL, GENERATION, Edges, StageSpec, pool_of
from vllm_omni_sched.graph.stages import GraphError, StageGraph, StageKind
from vllm_omni_sched.omni.stages.start.graph import graph_of

pytestmark = pytest.mark.omni


def graph(*stages: StageSpec, sources: dict[int, list[int] | None] | None = None) -> StageGraph:
    pools = [pool_of(i, stages, Edges()) for i in range(len(stages))]
    for stage_id, given in (sources or {}).items():
        for client in pools[stage_id].clients:
            client.engine_input_source = given
    return graph_of(pools)


def test_each_pool_is_a_stage() -> None:
    found = graph(StageSpec(), StageSpec(replicas=2, kind=GENERATION), StageSpec(kind=DIFFUSION, final_output=True))
    assert [
        (one.stage_id, one.name, one.kind, one.sources, one.final_output, one.replicas) for one in found.stages
    ] == [
        (0, "stage0", StageKind.AR, (), False, 1),
        (1, "stage1", StageKind.GENERATION, (0,), False, 2),
        (2, "stage2", StageKind.DIFFUSION, (1,), True, 1),
    ]
    assert found.entries == (0,)


def test_a_stage_that_does_not_say_reads_the_one_before() -> None:
    found = graph(StageSpec(), StageSpec(final_output=True), sources={0: None, 1: None})
    assert [one.sources for one in found.stages] == [(), (0,)]


def test_the_request_itself_is_no_stage() -> None:
    assert graph(StageSpec(final_output=True), sources={0: [-1]}).entries == (0,)


def test_a_stage_that_reads_from_none_that_is_there_is_refused() -> None:
    with pytest.raises(GraphError, match=r"stage1.* reads stage 7, which does not exist"):
        graph(StageSpec(), StageSpec(final_output=True), sources={1: [7]})


def test_a_later_stage_that_names_no_source_reads_the_one_before() -> None:
    found = graph(StageSpec(), StageSpec(), FINAL, sources={1: [], 2: []})
    assert [one.sources for one in found.stages] == [(), (0,), (1,)]
    assert found.entries == (0,)


@pytest.mark.parametrize(
    ("sources", "says"),
    [
        ({1: [2], 2: [1]}, r"wait for each other in a cycle: stage1 \(1\) -> stage2 \(2\) -> stage1 \(1\)"),
        ({0: [2]}, r"in a cycle: stage0 \(0\) -> stage1 \(1\) -> stage2 \(2\) -> stage0 \(0\)"),
        ({1: [-1]}, r"unreachable from the entries stage0 \(0\): stage1 \(1\), stage2 \(2\)"),
        ({2: [0], 1: [0]}, r"no final output depends on stage1 \(1\)"),
        ({2: [0, 1]}, r"stage2 \(2\) reads 0, 1, but vLLM-Omni gives it .* of stage stage1 \(1\) only.* be a line"),
    ],
)
def test_what_vllm_omni_cannot_run_is_refused_by_name(sources: dict[int, list[int] | None], says: str) -> None:
    with pytest.raises(GraphError, match=says):
        graph(StageSpec(), StageSpec(), FINAL, sources=sources)


def test_a_line_in_another_order_than_that_of_its_ids_is_refused() -> None:
    with pytest.raises(GraphError, match=r"stage1 \(1\) reads 2, but vLLM-Omni .* stage0 \(0\)"):
        graph(StageSpec(), StageSpec(final_output=True), StageSpec(), sources={1: [2], 2: [0]})
