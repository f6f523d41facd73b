"""Connectors of our options in vLLM-Omni's plan of the stages, and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from vllm_omni.distributed.omni_connectors.utils.config import ConnectorSpec, OmniTransferConfig
from vllm_omni.engine import stage_runtime
from vllm_omni.engine.stage_runtime import StageRuntime

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.stage_yaml import VARIABLE, load_stage_config, read_stage_options
from vllm_omni_sched.graph.stages import GraphError, Stage, StageGraph, StageKind
from vllm_omni_sched.omni.stages.start import edges, hooks
from vllm_omni_sched.omni.stages.start.edges import check_connectors
from vllm_omni_sched.omni.stages.start.graph import check_one_host
from vllm_omni_sched.omni.stages.start.plan import plan_stages
from vllm_omni_sched.plugin import register

pytestmark = pytest.mark.omni

ARENA = {"name": "ArenaConnector", "extra": {"stall_seconds": 3}}
SHM = {"name": "SharedMemoryConnector"}
BOTH = {("0", "1"): ConnectorSpec(**ARENA), ("1", "2"): ConnectorSpec(**ARENA)}


@pytest.fixture(autouse=True)
def stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stages' configs of these tests are what vLLM-Omni reads of them."""
    register()
    monkeypatch.setattr(stage_runtime, "extract_legacy_stage_metadata", lambda stage: stage)


def stage(stage_id: int, name: str, sources: list[int], **connectors: Any) -> Any:
    config = SimpleNamespace(**{"input_connectors": None, "output_connectors": None} | connectors)
    return SimpleNamespace(
        stage_id=stage_id,
        model_stage=name,
        stage_type="llm",
        engine_input_source=sources,
        final_output=name == "vocoder",
        connector_config=config,
    )


def line(**connectors: Any) -> list[Any]:
    """Three stages in a row; ``connectors`` are those of the first one."""
    return [stage(0, "thinker", [], **connectors), stage(1, "talker", [0]), stage(2, "vocoder", [1])]


def connected(runtime: dict[str, Any], transfer: Any = None, stages: list[Any] | None = None) -> Any:
    config = read_stage_options({"runtime": runtime}, "here")
    check_connectors(config)
    return plan_stages(config, stages or line(), transfer).transfer


def test_without_connectors_of_ours_nothing_changes() -> None:
    theirs = OmniTransferConfig({("0", "1"): ConnectorSpec(**SHM)})
    assert connected({}, theirs) is theirs
    assert connected({}) is None


def test_the_only_connector_is_on_all_edges() -> None:
    assert connected({"connectors": {"ours": ARENA}}).connectors == BOTH


@pytest.mark.parametrize(
    "named", [{"thinker->talker": "ours", "talker -> vocoder": "ours"}, {"0->1": "ours", "talker->2": "ours"}]
)
def test_edges_are_named_by_name_or_id(named: dict[str, str]) -> None:
    assert connected({"connectors": {"ours": ARENA}, "edges": named}).connectors == BOTH


def test_edges_that_meet_in_no_stage_may_differ() -> None:
    names, pairs = {0: "in", 1: "left", 2: "sound", 3: "picture"}, [(0, 2), (1, 3)]
    runtime = {"connectors": {"a": ARENA, "s": SHM}, "edges": {"in->sound": "a", "left->picture": "s"}}
    config = read_stage_options({"runtime": runtime}, "here")
    check_connectors(config)
    found = edges.merged_connectors(config, names, pairs, {}, set())
    assert {edge: spec.name for edge, spec in found.items()} == {
        ("0", "2"): "ArenaConnector",
        ("1", "3"): "SharedMemoryConnector",
    }


def test_what_vllm_omni_would_have_taken_by_itself_gives_way() -> None:
    default = OmniTransferConfig({("0", "1"): ConnectorSpec(**SHM), ("1", "2"): ConnectorSpec(**SHM)})
    assert connected({"connectors": {"ours": ARENA}}, default).connectors == BOTH


def test_the_same_in_the_deploy_yaml_is_no_contradiction() -> None:
    same = OmniTransferConfig(dict(BOTH))
    written = line(output_connectors={"to_stage_1": "ours"})
    assert connected({"connectors": {"ours": ARENA}}, same, written).connectors == BOTH


def test_another_one_in_the_deploy_yaml_is() -> None:
    written = line(output_connectors={"to_stage_1": "theirs"})
    with pytest.raises(ConfigError, match=r"SharedMemoryConnector.* on the edge 0->1, .*ArenaConnector.*: remove one"):
        connected({"connectors": {"ours": ARENA}}, OmniTransferConfig({("0", "1"): ConnectorSpec(**SHM)}), written)


@pytest.mark.parametrize(
    ("named", "says"),
    [
        (
            {"thinker->talkr": "ours"},
            r"'runtime\.edges\.thinker->talkr': there is no stage 'talkr'; did you .*'talker'",
        ),
        ({"thinker->vocoder": "ours"}, r"'runtime\.edges\.thinker->vocoder': .* no such edge; it has 0->1, 1->2"),
        ({"thinker->talker": "ours", "0->1": "ours"}, r"'runtime\.edges\.0->1': that edge is given twice"),
        (
            {"thinker->talker": "ours"},
            r"'runtime\.edges': stage 1 has one connector .* 0->1 and 1->2 must have the sam",
        ),
    ],
)
def test_bad_edges_are_refused_by_name(named: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        connected({"connectors": {"ours": ARENA}, "edges": named})


def test_the_article_s_file_is_one_connector_on_all_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    monkeypatch.setattr(edges, "reach_master", lambda options, clock: tried.append(options.master))
    monkeypatch.setattr(edges, "load_library", lambda: None)
    article = Path(__file__).parents[2] / "support" / "article.yaml"
    config = load_stage_config(None, {VARIABLE: str(article)})
    assert config is not None
    check_connectors(config)
    edges.check_reachable(config)
    found = plan_stages(config, line(), None).connectors
    assert set(found) == {("0", "1"), ("1", "2")}
    (one, other) = found.values()
    assert one == other
    assert one.name == "OmniAutoConnector"
    assert one.extra["arena"]["text"]["inline_bytes"] == 32768
    assert one.extra["mooncake"]["master"] == "master:50051"
    assert tried == ["master:50051"]


def test_a_mooncake_store_without_a_master_is_refused_before_stages_load_their_models() -> None:
    extra = {"master": "127.0.0.1:1", "connect_timeout_seconds": 0.01}
    far = {"name": "MooncakeConnector", "extra": extra}
    says = r"\.far\.extra\.master': no Mooncake master answers at 127\.0\.0\.1:1 .*: start .*; or remove the connector"
    with pytest.raises(ConfigError, match=says):
        edges.check_reachable(read_stage_options({"runtime": {"connectors": {"near": SHM, "far": far}}}, "here"))


def test_sizes_of_pools_without_a_connector_that_has_any_are_refused() -> None:
    config = read_stage_options({"text_pool_size": "1MB"}, "here")
    with pytest.raises(ConfigError, match=r"'pools\.text_pool_size' is for the shared memory .*: add one"):
        check_connectors(config)


def test_an_unknown_connector_is_refused_by_name() -> None:
    with pytest.raises(
        ConfigError, match=r"connectors\.ours\.name': .* 'ArenaConector'; did you mean 'ArenaConnector'"
    ):
        connected({"connectors": {"ours": {"name": "ArenaConector"}}})


def test_on_several_hosts_the_deploy_yaml_has_to_say_it() -> None:
    options = read_stage_options({"runtime": {"connectors": {"ours": ARENA}}}, "here")
    with pytest.raises(ConfigError, match=r"'runtime\.connectors': .*--stage-id"):
        plan_stages(options, line(), None, several_hosts=True)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What vLLM-Omni's runtime is given to plan its stages with."""
    found: list[Any] = []
    monkeypatch.setattr(
        StageRuntime,
        "_build_logical_stage_init_plans",
        lambda self, transfer, *others: found.append((transfer, others)),
    )
    monkeypatch.delenv(VARIABLE, raising=False)
    hooks.hook()
    return found


@pytest.mark.parametrize(
    ("options", "sources", "says"),
    [
        ("batching: {stages: {talkr: {}}}", [1], r"deploy\.yaml: 'omni_sched': .*talkr': .* did you mean 'talker'"),
        ("graph: {partition: {profiles: {9: {memory_bytes: 1, seconds: 1}}}}", [1], r"deploy\.yaml: .*profiles\.9"),
        (
            "runtime: {connectors: {a: {name: ArenaConnector}}, edges: {thinker->vocoder: a}}",
            [1],
            r"deploy\.yaml: 'omni_sched': option 'runtime\.edges\.thinker->vocoder': the pipeline has no such edge",
        ),
        ("", [0, 1], r"deploy\.yaml: 'omni_sched': stage talker \(1\) waits for chunks .* give the edge 0->1 one"),
        ("", [2], r"in a cycle: vocoder \(2\)"),
        ("", [-1], r"unreachable from .*: vocoder \(2\)"),
    ],
)
def test_what_is_wrong_is_told_before_stages_are_planned(
    planned: list[Any], tmp_path: Path, options: str, sources: list[int], says: str
) -> None:
    deploy = tmp_path / "deploy.yaml"
    deploy.write_text(f"omni_sched: {{{options}}}\n")
    runtime = object.__new__(StageRuntime)
    thinker, talker, _ = line()
    talker.final_output = True
    runtime._stage_configs, runtime._config_path = [thinker, talker, stage(2, "vocoder", sources)], str(deploy)
    for one in runtime._stage_configs:
        one.connector_config.async_chunk = True
    with pytest.raises(ConfigError, match=says):
        runtime._build_logical_stage_init_plans(None, [1, 1, 1], {})
    assert not planned


def test_the_runtime_plans_its_stages_with_them(planned: list[Any], tmp_path: Path) -> None:
    deploy = tmp_path / "deploy.yaml"
    deploy.write_text(
        "omni_sched: {runtime: {connectors: {ours: {name: ArenaConnector, extra: {stall_seconds: 3}}}}}\n"
    )
    runtime = object.__new__(StageRuntime)
    runtime._stage_configs, runtime._async_chunk = line(), True
    for path in (str(deploy), None):
        runtime._config_path = path
        runtime._build_logical_stage_init_plans(None, [1, 1, 1], {})
    assert planned == [(OmniTransferConfig(BOTH), ([1, 1, 1], {})), (None, ([1, 1, 1], {}))]


@pytest.mark.parametrize("chunks", [False, True])
def test_stages_that_branch_are_planned_with_the_connector_for_that(
    planned: list[Any], tmp_path: Path, chunks: bool
) -> None:
    deploy = tmp_path / "deploy.yaml"
    deploy.write_text("omni_sched: {runtime: {connectors: {ours: {name: ArenaConnector}}}}\n")
    runtime = object.__new__(StageRuntime)
    thinker, talker, _ = line()
    talker.final_output = True
    runtime._stage_configs, runtime._config_path = [thinker, talker, stage(2, "vocoder", [0])], str(deploy)
    for one in runtime._stage_configs:
        one.connector_config.async_chunk = chunks
    runtime._build_logical_stage_init_plans(None, [1, 1, 1], {})
    [(transfer, _)] = planned
    extra = {"connector": "ArenaConnector", "extra": {}, "edges": [[0, 1], [0, 2]]}
    extra |= {"chunked": [1, 2]} if chunks else {}
    assert transfer.connectors == dict.fromkeys([("0", "1"), ("0", "2")], ConnectorSpec("OmniBranchConnector", extra))


def test_stages_on_several_hosts_do_not_branch() -> None:
    branching = StageGraph.of(
        [
            Stage(0, "thinker", StageKind.AR),
            Stage(1, "talker", StageKind.AR, (0,), final_output=True),
            Stage(2, "painter", StageKind.AR, (0,), final_output=True),
        ]
    )
    check_one_host(branching, several_hosts=False)
    with pytest.raises(GraphError, match=r"several hosts \(--stage-id\)"):
        check_one_host(branching, several_hosts=True)
