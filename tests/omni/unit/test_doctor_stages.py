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


def test_without_the_deploy_yaml_it_is_said_what_is_not_checked(tmp_path):
    status, said = run("--stages", deploy(tmp_path, "runtime: {stall_seconds: null}\n", "ours.yaml"))
    assert status == 0
    assert "runtime.stall_seconds null given" in said
    assert "names and edges are not checked: give the deploy YAML" in said
    assert "The stage scheduler is on." in said


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


def test_a_file_that_is_not_there_is_a_problem(tmp_path):
    status, found = findings("--stages", tmp_path / "none.yaml")
    assert status == 1
    assert "none.yaml', which cannot be read" in found["stages"]["problems"][0]


def test_options_in_two_places_are_a_problem(tmp_path, healthy):
    healthy.setenv(VARIABLE, str(deploy(tmp_path, "{}", "ours.yaml")))
    status, found = findings("--stages", deploy(tmp_path, "omni_sched: {}\n"))
    assert status == 1
    assert f"and {VARIABLE}=" in found["stages"]["problems"][0]


def test_the_file_that_the_environment_names_is_checked_unasked(tmp_path, healthy):
    healthy.setenv(VARIABLE, str(deploy(tmp_path, "runtime: {stall_second: 3}\n", "ours.yaml")))
    status, found = findings()
    assert status == 1
    assert "did you mean 'runtime.stall_seconds'?" in found["stages"]["problems"][0]


def test_without_a_file_nothing_is_said_of_stages():
    assert findings()[1]["stages"] is None
    assert "stage" not in run()[1].lower()


def test_without_vllm_omni_no_stage_can_start(tmp_path, healthy):
    healthy.setattr(diagnosis, "find_spec", lambda name: None)
    status, found = findings("--stages", deploy(tmp_path, "omni_sched: {}\n"))
    assert status == 1
    assert "vLLM-Omni is not installed" in found["stages"]["problems"][0]
    assert options_of(found)["runtime.stall_seconds"] == (1800, False)


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


def test_addresses_are_tried():
    assert diagnosis._is_own_address("127.0.0.1")
    assert not diagnosis._is_own_address("192.0.2.1")  # for documentation


def test_a_missing_library_is_a_problem(healthy):
    def missing():
        raise ConfigError("the Mooncake transport needs mooncake-transfer-engine, which is not installed")

    healthy.setattr(edges, "load_library", missing)
    status, found = findings("--stages", ARTICLE)
    assert status == 1
    assert found["stages"]["problems"] == [
        f"{ARTICLE}: the Mooncake transport needs mooncake-transfer-engine, which is not installed"
    ]


def test_connectors_that_cannot_be_combined_are_a_problem_without_a_pipeline(tmp_path):
    text = "runtime: {connectors: {a: {name: SharedMemoryConnector}, b: {name: OmniAutoConnector}}}\n"
    status, found = findings("--stages", deploy(tmp_path, text, "ours.yaml"))
    assert status == 1
    (problem,) = found["stages"]["problems"]
    assert "ours.yaml: option 'runtime.connectors.b.name': OmniAutoConnector cannot be one of several routes" in problem


def test_all_problems_are_listed(tmp_path):
    text = "runtime: {connectors: {a: {name: ArenaConector}}}\nmonitoring: {journal: {path: /proc/none/f.jsonl}}\n"
    status, found = findings("--stages", deploy(tmp_path, text, "ours.yaml"))
    assert status == 1
    connector, journal = found["stages"]["problems"]
    assert "'runtime.connectors.a.name': there is no connector 'ArenaConector'" in connector
    assert "'monitoring.journal.path': no file can be made in '/proc/none'" in journal


def test_a_model_without_stages_is_a_usage_error():
    assert run("--model", "m")[0] == 2


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


@pytest.mark.omni
@pytest.mark.slow
def test_in_async_chunk_mode_there_are_no_credits(tmp_path, tiny):
    _, found = findings("--stages", deploy(tmp_path, TEXT.replace("async_chunk: false", "async_chunk: true")))
    part = {part["feature"]: part for part in found["stages"]["stages"][0]["parts"]}["credits"]
    assert (part["active"], part["reason"]) == (False, "stages that exchange chunks start at once (async_chunk)")


@pytest.mark.omni
@pytest.mark.slow
def test_a_pipeline_that_nothing_names_is_not_checked(tmp_path, tiny):
    status, found = findings("--stages", deploy(tmp_path, TEXT.replace("pipeline: tiny_text_to_sound", "")))
    assert status == 0
    assert found["stages"]["stages"] == []
    assert "give --model" in found["stages"]["note"]


PLACED = """
pipeline: tiny_text_to_sound
async_chunk: false
stages:
  - {stage_id: 0, devices: "0"}
  - {stage_id: 1, devices: "1"}
  - {stage_id: 2, devices: "1"}
omni_sched:
  graph:
    partition:
      devices: {0: {memory_bytes: 100}, 1: {memory_bytes: 100}}
      profiles:
        thinker: {memory_bytes: 60, seconds: 4.0, tensor_parallel: {2: 0.9}}
        talker: {memory_bytes: 20, seconds: 0.2}
        vocoder: {memory_bytes: 20, seconds: 0.1}
"""


@pytest.mark.omni
@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_devices_are_suggested_as_keys_of_the_deploy_yaml(tmp_path):
    file = deploy(tmp_path, PLACED)
    status, found = findings("--stages", file)
    assert (status, found["stages"]["problems"]) == (0, [])
    suggestion = found["stages"]["suggestion"]
    thinker, *others = suggestion["stages"]
    assert thinker == {"stage_id": 0, "devices": "0,1", "tensor_parallel_size": 2}
    assert [one["tensor_parallel_size"] for one in others] == [1, 1]
    assert suggestion["note"].startswith("0.4128 requests/s, ")  # 4.0 s / 1.8 + 0.2 s
    assert "with the devices in the deploy YAML 0.25 and 4.3 s" in suggestion["note"]
    assert "thinker (0): split on 0,1, elsewhere fewer requests per second" in suggestion["reasons"][0]
    said = run("--stages", file)[1]
    assert "stages: - stage_id: 0 devices: 0,1 tensor_parallel_size: 2" in said
    followed = deploy(
        tmp_path, yaml.safe_dump(yaml.safe_load(PLACED) | {"stages": suggestion["stages"]}), "followed.yaml"
    )
    status, found = findings("--stages", followed)
    assert (status, found["stages"]["problems"]) == (0, []), "vLLM-Omni reads the suggestion"
    assert "with the devices in the deploy YAML 0.4128 and" in found["stages"]["suggestion"]["note"]


@pytest.mark.omni
@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("talker: {memory_bytes: 20, seconds: 0.2}", "", "add 'graph.partition.profiles' of talker"),
        ("talker: {memory_bytes: 20,", "talker: {memory_bytes: 130,", "impossible: stage 1 lacks 30 bytes"),
        ("thinker: {memory_bytes: 60,", "thinker: {memory_bytes: 130,", "cannot be compared: they do not fit"),
    ],
)
def test_it_is_said_what_a_suggestion_lacks(tmp_path, before, after, says):
    assert before in PLACED
    status, found = findings("--stages", deploy(tmp_path, PLACED.replace(before, after)))
    assert (status, found["stages"]["problems"]) == (0, [])
    assert says in found["stages"]["suggestion"]["note"]


@pytest.mark.omni
@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_a_start_without_room_names_the_split_that_has_it(tmp_path):
    text = PLACED.replace("memory_bytes: 60", "memory_bytes: 130")
    text = text.replace("partition:", "partition:\n      enabled: true")
    status, found = findings("--stages", deploy(tmp_path, text))
    assert status == 1
    (problem,) = found["stages"]["problems"]
    assert "stage 0 lacks 30 bytes" in problem
    assert "or split a stage in the deploy YAML: stages [{'stage_id': 0, 'devices': '0,1'" in problem
    resized = text.replace("enabled: true", "resize_running: true\n      enabled: true")
    (problem,) = findings("--stages", deploy(tmp_path, resized))[1]["stages"]["problems"]
    assert "option 'graph.partition.resize_running': vLLM-Omni cannot change tensor_parallel_size" in problem
