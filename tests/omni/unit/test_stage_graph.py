"""vLLM-Omni's pipeline as our graph."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from tests.support.omni_stages import DIFFUSION, GENERATION, Edges, StageSpec, pool_of
from vllm_omni_sched.graph.stages import GraphError, StageGraph, StageKind
from vllm_omni_sched.omni.stages.graph import graph_of

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
    with pytest.raises(GraphError, match="7"):
        graph(StageSpec(), StageSpec(final_output=True), sources={1: [7]})
