"""vLLM-Omni's pipeline as our graph."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from vllm_omni.distributed.omni_connectors.utils.config import ConnectorSpec, OmniTransferConfig

from tests.support.omni_stages import DIFFUSION, FINAL, GENERATION, Edges, StageSpec, pool_of
from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.graph.stages import GraphError, StageGraph, StageKind
from vllm_omni_sched.omni.stages.start.branch_edges import with_branch_connector
from vllm_omni_sched.omni.stages.start.graph import check_handoffs, graph_of, with_chunks

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
    ],
)
def test_what_vllm_omni_cannot_run_is_refused_by_name(sources: dict[int, list[int] | None], says: str) -> None:
    with pytest.raises(GraphError, match=says):
        graph(StageSpec(), StageSpec(), FINAL, sources=sources)


def test_a_stage_that_reads_one_with_a_larger_id_is_refused() -> None:
    with pytest.raises(GraphError, match=r"stage1 \(1\) reads stage stage2 \(2\), which has a larger id"):
        graph(StageSpec(), StageSpec(final_output=True), StageSpec(), sources={1: [2], 2: [0]})


def test_stages_may_fork_and_join() -> None:
    found = graph(StageSpec(), StageSpec(), StageSpec(), FINAL, sources={2: [0], 3: [2, 1]})
    assert found.branches
    assert [one.sources for one in found.stages] == [(), (0,), (0,), (2, 1)]
    assert [sorted(found.ancestors(one)) for one in range(4)] == [[], [0], [0], [0, 1, 2]]
    assert not graph(StageSpec(), StageSpec(), FINAL).branches


ALL = {(0, 1), (0, 2), (1, 3), (2, 3)}


def diamond() -> StageGraph:
    return graph(StageSpec(), StageSpec(), StageSpec(), FINAL, sources={2: [0], 3: [1, 2]})


def reading(found: StageGraph) -> list[int]:
    return [stage.stage_id for stage in found.stages if stage.reads_chunks]


def test_stages_in_async_chunk_mode_read_chunks_of_the_edges_with_a_connector() -> None:
    assert reading(with_chunks(diamond(), ALL, {0, 1, 2, 3}, {0, 1, 2})) == [1, 2, 3]
    assert reading(with_chunks(diamond(), ALL, set(), {0, 1, 2})) == []
    assert reading(with_chunks(diamond(), {(0, 1)}, {0, 1}, {0})) == [1]
    line = graph(StageSpec(), FINAL)
    assert with_chunks(line, {(0, 1)}, {0, 1}) is line


def test_a_diffusion_stage_gets_a_prompt_in_async_chunk_mode_too() -> None:
    painted = graph(StageSpec(), FINAL, StageSpec(kind=DIFFUSION, final_output=True), sources={2: [0]})
    assert reading(with_chunks(painted, {(0, 1)}, {0, 1, 2}, {0})) == [1]


@pytest.mark.parametrize(
    ("carried", "async_chunk", "makers", "says"),
    [
        (
            ALL,
            {0, 1, 2},
            {0, 1, 2},
            r"stage1 \(1\) exchanges chunks \(async_chunk: true\) and stage stage3 \(3\) whole payloads.* set the same",
        ),
        (
            ALL,
            {1, 2, 3},
            {0, 1, 2},
            r"stage stage1 \(1\) exchanges chunks .* and stage stage0 \(0\) whole payloads \(async_chunk: false\)",
        ),
        (
            ALL - {(2, 3)},
            {0, 1, 2, 3},
            {0, 1, 2},
            r"reads stage stage1 \(1\) in chunks .* the edge 2->3 has no connector: give it the same connector",
        ),
        (
            {(0, 1)},
            {0, 1, 2},
            {0},
            r"stage2 \(2\) waits for chunks .* none of its edges has a connector: give the edge 0->2 one",
        ),
        (
            ALL,
            {0, 1, 2, 3},
            {0, 1},
            r"stage stage2 \(2\) in chunks .* no function that makes chunks .*async_chunk_process",
        ),
    ],
)
def test_a_stage_that_would_wait_for_chunks_for_ever_is_refused(
    carried: set[tuple[int, int]], async_chunk: set[int], makers: set[int], says: str
) -> None:
    with pytest.raises(GraphError, match=says):
        with_chunks(diamond(), carried, async_chunk, makers)


def test_stages_that_branch_pass_on_no_caches() -> None:
    stages = (StageSpec(), FINAL, FINAL)
    pools = [pool_of(at, stages, Edges()) for at in range(3)]
    branching, line = graph(*stages, sources={2: [0]}), graph(*stages)
    check_handoffs(branching, pools, None)
    with pytest.raises(GraphError, match=r"sends its KV cache to the next one"):
        check_handoffs(branching, pools, {"pd_pair": (0, 1)})
    check_handoffs(line, pools, {"pd_pair": (0, 1)})


LOCAL = ConnectorSpec("SharedMemoryConnector", {"size": 1})


def transfer(**connectors: ConnectorSpec) -> OmniTransferConfig:
    return OmniTransferConfig({(edge[1], edge[3]): spec for edge, spec in connectors.items()}, None)


def test_the_connector_of_all_edges_is_wrapped() -> None:
    found = graph(StageSpec(), FINAL, FINAL, sources={2: [0]})
    wrapped = with_branch_connector(found, transfer(e0_1=LOCAL, e0_2=LOCAL)).connectors
    assert wrapped.keys() == {("0", "1"), ("0", "2")}
    assert {spec.name for spec in wrapped.values()} == {"OmniBranchConnector"}
    assert wrapped["0", "2"].extra == {"connector": LOCAL.name, "extra": LOCAL.extra, "edges": [[0, 1], [0, 2]]}


def test_the_connector_is_told_which_stages_read_chunks() -> None:
    found = graph(StageSpec(), FINAL, FINAL, sources={2: [0]}).with_chunks([1])
    wrapped = with_branch_connector(found, transfer(e0_1=LOCAL, e0_2=LOCAL)).connectors
    assert wrapped["0", "1"].extra["chunked"] == [1]


def test_an_edge_without_a_connector_stays_without() -> None:
    found = graph(StageSpec(), FINAL, FINAL, sources={2: [0]})
    wrapped = with_branch_connector(found, transfer(e0_2=LOCAL)).connectors
    assert wrapped["0", "2"].extra["edges"] == [[0, 2]]
    assert with_branch_connector(found, None) is None


def test_the_connectors_of_a_line_stay_as_they_are() -> None:
    given = transfer(e0_1=LOCAL)
    assert with_branch_connector(graph(StageSpec(), FINAL), given) is given


@pytest.mark.parametrize(
    ("connectors", "says"),
    [
        ({"e0_1": LOCAL, "e1_2": LOCAL}, r"on the edge 1->2, but stage 2 does not read stage 1: edges are 0->1, 0->2"),
        ({"e0_1": LOCAL, "e0_2": ConnectorSpec("ArenaConnector", {})}, r"0->1 has SharedMemory.* 0->2 ArenaConnector"),
        (
            {"e0_1": ConnectorSpec("NixlConnector", {})},
            r"NixlConnector receives from one sender, whose address",
        ),
    ],
)
def test_connectors_that_cannot_branch_are_refused(connectors: dict[str, ConnectorSpec], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        with_branch_connector(graph(StageSpec(), FINAL, FINAL, sources={2: [0]}), transfer(**connectors))
