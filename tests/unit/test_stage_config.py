"""Options of the stage scheduler: where they are found, and what they are when nothing is said."""

from pathlib import Path

import pytest
import yaml

from tests.support.stage_files import deploy
from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.stage_options import BalancePolicy, StageSchedConfig
from vllm_omni_sched.config.stage_yaml import VARIABLE, check_against, load_stage_config, read_stage_options
from vllm_omni_sched.graph.order import DEFAULT_CLASSES
from vllm_omni_sched.resource.pid import PidGains

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "stages.yaml"


def test_without_the_key_and_the_variable_there_is_nothing(tmp_path):
    assert load_stage_config(None, {}) is None
    assert load_stage_config(None, {VARIABLE: ""}) is None
    assert load_stage_config(deploy(tmp_path, "stages: []\n"), {}) is None
    assert load_stage_config(deploy(tmp_path, "- not ours to refuse\n"), {}) is None


@pytest.mark.parametrize("written", ["omni_sched: {}", "omni_sched:"])
def test_an_empty_mapping_gives_the_defaults(tmp_path, written):
    assert load_stage_config(deploy(tmp_path, written), {}) == StageSchedConfig()


def test_the_complete_example_says_the_defaults():
    config = load_stage_config(None, {VARIABLE: str(EXAMPLE)})
    given = config.model_dump()
    assert given["runtime"].pop("connectors") == {"local": {"name": "OmniAutoConnector", "extra": {}}}
    assert given["runtime"].pop("edges") == {"thinker->talker": "local", "talker->code2wav": "local"}
    assert set(given["batching"].pop("stages")) == {"talker", "2"}
    assert given["pools"].pop("total_bytes") == 8 << 30
    assert given["graph"]["priority"].pop("by_modality") == {"audio": "realtime"}
    assert given["graph"]["priority"].pop("client_classes") == ["interactive", "batch"]
    usual = StageSchedConfig().model_dump()
    del usual["graph"]["priority"]["by_modality"], usual["graph"]["priority"]["client_classes"]
    del (
        usual["runtime"]["connectors"],
        usual["runtime"]["edges"],
        usual["batching"]["stages"],
        usual["pools"]["total_bytes"],
    )
    assert given == usual


def test_the_example_is_complete():
    def keys(value, at=""):
        if not isinstance(value, dict):
            return {at}
        return {key for name, inner in value.items() for key in keys(inner, f"{at}.{name}")} | {at}

    named = keys(yaml.safe_load(EXAMPLE.read_text()))
    defaults = StageSchedConfig().model_dump(exclude_none=True)
    assert keys(defaults) - named == set()


def test_defaults_are_those_of_the_policies():
    config = StageSchedConfig()
    gains = PidGains()
    batching = config.batching
    assert (batching.kp, batching.ki, batching.kd) == (gains.proportional, gains.integral, gains.derivative)
    for sla in DEFAULT_CLASSES:
        targets = config.graph.priority.classes[sla.name]
        assert targets.rank == sla.rank
        assert float("inf" if targets.ttft_ms is None else targets.ttft_ms / 1000) == sla.ttft_seconds


def test_the_deploy_yaml_may_name_a_file_beside_it(tmp_path):
    deploy(tmp_path, "balancing: {policy: least-queue}\n", "ours.yaml")
    config = load_stage_config(deploy(tmp_path, "omni_sched: ours.yaml\n"), {})
    assert config.balancing.policy is BalancePolicy.LEAST_QUEUE


def test_what_a_deploy_yaml_lacks_comes_from_its_base(tmp_path):
    deploy(tmp_path, "omni_sched: {runtime: {credits: {capacity: 5}}}\n", "base.yaml")
    config = load_stage_config(deploy(tmp_path, "base_config: base.yaml\n"), {})
    assert config.runtime.credits.capacity == 5
    off = deploy(tmp_path, "base_config: base.yaml\nomni_sched: off\n", "off.yaml")
    assert load_stage_config(off, {}) is None
    loop = deploy(tmp_path, "base_config: loop.yaml\n", "loop.yaml")
    with pytest.raises(ConfigError, match="'base_config' refers back to this file; remove it"):
        load_stage_config(loop, {})


def test_the_options_of_a_stage():
    config = read_stage_options(
        {"batching": {"max_batch_size": 16, "stages": {"talker": {"max_batch_size": 4}, 2: {"enabled": False}}}}, "here"
    )
    of = config.batching.of_stage
    assert [of(0, "thinker").max_batch_size, of(1, "talker").max_batch_size] == [16, 4]
    assert [of(1, "talker").enabled, of(2, "code2wav").enabled] == [True, False]
    check_against(config, {0: "thinker", 1: "talker", 2: "code2wav"})


@pytest.mark.parametrize("monitoring", [{"enabled": False}, {"anomaly": {"enabled": False}}])
def test_hangs_that_nobody_asked_for_need_no_monitoring(monitoring):
    assert read_stage_options({"monitoring": monitoring}, "here").runtime.recovery.hang_seconds == 60
    never = {"runtime": {"recovery": {"hang_seconds": None}}, "monitoring": monitoring}
    assert read_stage_options(never, "here").runtime.recovery.hang_seconds is None


def test_an_empty_section_has_its_defaults(tmp_path):
    text = "batching:\nruntime: {recovery: , edges: }\ngraph: {priority: {classes: }}\npools: {shares: }\n"
    (tmp_path / "ours.yaml").write_text(text)
    assert load_stage_config(None, {VARIABLE: str(tmp_path / "ours.yaml")}) == StageSchedConfig()
    own = read_stage_options({"batching": {"stages": {"talker": None}}}, "here").batching
    assert own.of_stage(1, "talker") == StageSchedConfig().batching.of_stage(1, "talker")


def test_what_several_sections_share_is_not_there_twice(tmp_path):
    text = "omni_sched: {batching: {stages: {a: &one {hold_ms: 1}, b: *one, c: {<<: *one, min_batch_size: 2}}}}\n"
    stages = load_stage_config(deploy(tmp_path, text), {}).batching.stages
    assert [own.hold_ms for own in stages.values()] == [1, 1, 1]


ARTICLE = """
runtime:
  connectors:
    shared: {name: SharedMemoryConnector}
    store: {name: MooncakeStoreConnector, extra: {host: 127.0.0.1, metadata_server: "http://127.0.0.1:8080/metadata"}}
  edges: {thinker->talker: shared, talker->code2wav: store}
batching:
  enabled: true
  min_batch_size: 1
  max_batch_size: 32
  target_latency_ms: 50
  adjust_interval_ms: 1000
pools:
  total_bytes: 8589934592
  shares: {text: 0.1, image: 0.4, audio: 0.1, video: 0.4}
monitoring:
  enabled: true
  anomaly: {enabled: true}
  forecast: {enabled: true}
"""


def test_the_layout_of_the_design_article_loads(tmp_path):
    """Its names and values as the project's plan quotes them; the article's own text was not to be had."""
    config = load_stage_config(None, {VARIABLE: str(deploy(tmp_path, ARTICLE, "article.yaml"))})
    batches = config.batching.of_stage(1, "talker")
    assert (batches.min_batch_size, batches.max_batch_size) == (1, 32)
    assert (batches.target_latency_ms, batches.adjust_interval_ms) == (50, 1000)
    assert batches == StageSchedConfig().batching.of_stage(1, "talker")
    assert {key: one.name for key, one in config.runtime.connectors.items()} == {
        "shared": "SharedMemoryConnector",
        "store": "MooncakeStoreConnector",
    }
    assert config.pools.shares.image == 0.4
    assert config.monitoring.forecast.enabled
