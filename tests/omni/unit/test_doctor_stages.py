"""`vllm-omni-sched doctor --stages`: options of the stage scheduler, what they make active, and what is wrong."""

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from tests.support.stage_files import deploy
from vllm_omni_sched.cli import app, diagnosis, doctor
from vllm_omni_sched.cli.diagnosis import Diagnosis
from vllm_omni_sched.config.errors import ConfigError, RendezvousError
from vllm_omni_sched.config.stage_yaml import VARIABLE
from vllm_omni_sched.omni.stages.start import edges

ARTICLE = Path(__file__).parents[2] / "support" / "article.yaml"

TEXT = """
pipeline: tiny_text_to_sound
async_chunk: false
stages:
  - {stage_id: 0, max_num_seqs: 8}
  - {stage_id: 1, num_replicas: 2}
omni_sched:
  runtime:
    credits: {enabled: true, capacity: 32}
    connectors: {local: {name: ArenaConnector, extra: {stall_seconds: 3}}}
    recovery: {hang_seconds: 2000}
  batching: {stages: {talker: {max_batch_size: 4, target_latency_ms: 200}}}
"""


@pytest.fixture(autouse=True)
def healthy(monkeypatch):
    """All is well with vLLM, which is not looked at, and with vLLM-Omni, which is not imported."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(doctor, "diagnose", lambda _: Diagnosis([], [], [], []))
    monkeypatch.setattr(diagnosis, "find_spec", lambda name: name)
    return monkeypatch


def run(*arguments):
    result = CliRunner().invoke(app, ["doctor", *map(str, arguments)], catch_exceptions=False)
    return result.exit_code, " ".join(result.stdout.split())


def findings(*arguments):
    status, said = run("--json", *arguments)
    return status, json.loads(said)


def options_of(found):
    return {one["name"]: (one["value"], one["given"]) for one in found["stages"]["options"]}


def test_each_option_of_a_file_is_shown_with_the_value_that_it_has(tmp_path):
    text = "runtime: {recovery: {hang_seconds: 2000}}\nbatching: {stages: {talker: {hold_ms: 0}}}\n"
    status, found = findings("--stages", deploy(tmp_path, text, "ours.yaml"))
    shown = options_of(found)
    assert status == 0
    assert found["ok"] is True
    assert shown["runtime.recovery.hang_seconds"] == (2000, True)
    assert shown["runtime.stall_seconds"] == (4000, False)  # it follows
    assert shown["graph.priority.client_classes"] == (["interactive", "batch"], False)
    assert shown["graph.priority.classes.realtime.rank"] == (0, False)
    assert shown["batching.stages.talker.hold_ms"] == (0, True)
    assert "batching.stages.talker.max_batch_size" not in shown  # that of all stages


@pytest.mark.parametrize("text", ["stages: []\n", "omni_sched: off\nstages: []\n"])
def test_a_deploy_yaml_without_our_key_leaves_it_off(tmp_path, text):
    file = deploy(tmp_path, text)
    status, said = run("--stages", file)
    assert status == 0
    assert "The stage scheduler is off" in said
    assert findings("--stages", file)[1]["stages"]["active"] is False


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("omni_sched: {batchin: {}}\n", "unknown option 'batchin'; did you mean 'batching'?"),
        ("omni_sched: {runtime: {stall_seconds: -1}}\n", "option 'runtime.stall_seconds'"),
        ("batching: {min_batch_size: 9, max_batch_size: 3}\n", "option 'min_batch_size' must not be above"),
        ("omnisched: {}\nstages: []\n", "the key 'omnisched' is unknown; did you mean 'omni_sched'?"),
        ("omni_sched: {pools: {}, pools: {}}\n", "option 'omni_sched.pools' is given twice"),
        ("batching: [\n", "not valid YAML"),
    ],
)
def test_what_is_wrong_is_said_with_file_and_key_and_status_1(tmp_path, text, says):
    file = deploy(tmp_path, text)
    status, found = findings("--stages", file)
    assert (status, found["ok"], found["stages"]["options"]) == (1, False, [])
    (problem,) = found["stages"]["problems"]
    assert str(file) in problem
    assert says in problem
    status, said = run("--stages", file)
    assert status == 1
    assert "Cannot serve the stages" in said


@pytest.fixture
def no_library(healthy):
    """Whether the Mooncake library is installed does not matter."""
    healthy.setattr(edges, "load_library", lambda: None)


def no_master(options, clock):
    raise RendezvousError(f"no Mooncake master answers at {options.master}")


@pytest.mark.usefixtures("no_library")
def test_the_article_s_file_is_shown_with_its_routes_and_what_is_wrong(healthy):
    healthy.setattr(edges, "reach_master", no_master)
    healthy.setattr(diagnosis, "_is_own_address", lambda host: host != "192.168.1.100")
    status, found = findings("--stages", ARTICLE)
    assert (status, found["stages"]["problems"]) == (0, [])
    shown = options_of(found)
    assert shown["batching.target_latency_ms"] == (50, True)
    assert shown["batching.adjust_interval_ms"] == (1000, True)
    assert shown["pools.image_pool_size"] == (2 << 30, True)
    (edge,) = found["stages"]["edges"]
    assert (edge["edge"], edge["connector"], edge["source"]) == (
        "every edge",
        "OmniAutoConnector",
        "runtime.connectors",
    )
    routes = {route["name"]: route["values"] for route in edge["routes"]}
    assert list(routes) == ["connector_small", "connector_large", "", "connector_distributed"]
    assert routes["connector_large"]["inline_up_to_bytes"] == 1 << 20
    assert routes["connector_distributed"]["localbuf"] == 64 << 20
    master, host = found["stages"]["warnings"]
    assert (
        "'runtime.connectors.connector_distributed.extra.master': no Mooncake master answers at master:50051" in master
    )
    assert "'runtime.connectors.connector_distributed.extra.host': 192.168.1.100 is not an address of this host" in host
    said = run("--stages", ARTICLE)[1]
    assert "image to stages on this host: inline_up_to_bytes 1,048,576, tuned_from_bytes 32,768" in said
    assert "Wrong on this host" in said


def test_a_missing_library_is_a_problem(healthy):
    def missing():
        raise ConfigError("the Mooncake transport needs mooncake-transfer-engine, which is not installed")

    healthy.setattr(edges, "load_library", missing)
    status, found = findings("--stages", ARTICLE)
    assert status == 1
    assert found["stages"]["problems"] == [
        f"{ARTICLE}: the Mooncake transport needs mooncake-transfer-engine, which is not installed"
    ]


@pytest.fixture
def tiny(healthy):
    """vLLM-Omni itself, which knows the tiny pipelines."""
    from vllm_omni.config import pipeline_registry

    from dev.omni_cpu.pipelines import PIPELINES

    for name, pipeline in PIPELINES.items():
        healthy.setitem(pipeline_registry.OMNI_PIPELINES, name, pipeline)


@pytest.mark.omni
@pytest.mark.slow
def test_each_stage_and_edge_is_shown_with_what_is_active(tmp_path, tiny):
    file = deploy(tmp_path, TEXT)
    status, found = findings("--stages", file)
    assert (status, found["stages"]["problems"]) == (0, [])
    thinker, talker, vocoder = found["stages"]["stages"]
    assert [(one["name"], one["kind"], one["replicas"]) for one in (thinker, talker, vocoder)] == [
        ("thinker", "ar", 1),
        ("talker", "ar", 2),
        ("vocoder", "generation", 1),
    ]
    of = {one["name"]: {part["feature"]: part for part in one["parts"]} for one in (thinker, talker, vocoder)}
    assert of["thinker"]["batching"]["reason"].startswith("always max_num_seqs 8 requests: 'batching.target_latency_")
    assert of["talker"]["batching"]["reason"].startswith("1 to 4 requests without an output yet, max_num_seqs")
    assert "aims at 200 ms" in of["talker"]["batching"]["reason"]
    assert "hold" in of["vocoder"]
    assert "hold" not in of["talker"]
    assert [of[name]["balancing"]["active"] for name in of] == [False, True, False]
    assert of["vocoder"]["credits"] == {"feature": "credits", "active": True, "reason": "room for 32 requests"}
    assert [(edge["edge"], edge["connector"], edge["extra"], edge["source"]) for edge in found["stages"]["edges"]] == [
        ("thinker (0) -> talker (1)", "ArenaConnector", {"stall_seconds": 3}, "runtime.connectors"),
        ("talker (1) -> vocoder (2)", "ArenaConnector", {"stall_seconds": 3}, "runtime.connectors"),
    ]
    said = run("--stages", file)[1]
    assert "Stage talker (1), ar, 2 replicas" in said
    assert "runtime.stall_seconds 4000" in said


@pytest.mark.omni
@pytest.mark.slow
@pytest.mark.usefixtures("no_library", "tiny")
def test_the_article_s_connectors_are_on_each_edge_of_a_pipeline(tmp_path, healthy):
    healthy.setattr(edges, "reach_master", lambda options, clock: None)
    healthy.setattr(diagnosis, "_is_own_address", lambda _: True)
    content = yaml.safe_load(TEXT) | {"omni_sched": yaml.safe_load(ARTICLE.read_text())}
    status, found = findings("--stages", deploy(tmp_path, yaml.safe_dump(content)))
    assert (status, found["stages"]["problems"], found["stages"]["warnings"]) == (0, [], [])
    shown = found["stages"]["edges"]
    assert [(edge["edge"], edge["connector"]) for edge in shown] == [
        ("thinker (0) -> talker (1)", "OmniAutoConnector"),
        ("talker (1) -> vocoder (2)", "OmniAutoConnector"),
    ]
    assert [[route["name"] for route in edge["routes"]] for edge in shown] == [
        ["connector_small", "connector_large", "", "connector_distributed"]
    ] * 2
    batching = [part for part in found["stages"]["stages"][1]["parts"] if part["feature"] == "batching"]
    assert batching[0]["reason"].startswith("1 to 32 requests without an output yet, max_num_seqs")
    assert batching[0]["reason"].endswith("aims at 50 ms, adjusted each 1000 ms")


@pytest.mark.omni
@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("stages: {talker:", "stages: {taker:", "option 'batching.stages.taker': there is no such stage; did you mean"),
        (
            "  batching:",
            "    edges: {talker->thinker: local}\n  batching:",
            "the pipeline has no such edge; it has 0->1",
        ),
        ("ArenaConnector", "ArenaConnecter", "there is no connector 'ArenaConnecter'; did you mean 'ArenaConnector'?"),
        ("tiny_text_to_sound", "tiny_text_to_smell", "there is no pipeline 'tiny_text_to_smell'"),
        ("  batching:", "  graph: {partition: {enabled: true}}\n  batching:", "'devices' must name the devices"),
    ],
)
def test_what_the_pipeline_does_not_have_is_a_problem(tmp_path, tiny, before, after, says):
    file = deploy(tmp_path, TEXT.replace(before, after))
    status, found = findings("--stages", file)
    assert status == 1
    (problem,) = found["stages"]["problems"]
    assert str(file) in problem
    assert says in problem
