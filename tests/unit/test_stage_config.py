"""Options of the stage scheduler: where they are found, and what they are when nothing is said."""

from pathlib import Path

import pytest
import yaml

from tests.support.stage_files import deploy
from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.stage_options import BalancePolicy, StageSchedConfig
from vllm_omni_sched.config.stage_options.batching import BatchLimits
from vllm_omni_sched.config.stage_yaml import VARIABLE, check_against, load_stage_config, read_stage_options
from vllm_omni_sched.resource.pid import PidBatch
from vllm_omni_sched.resource.pipeline.stage_limits import control_of

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
    assert config.pools.of_connectors == article().pools.of_connectors
    for name in config.pools.of_connectors:
        del given["pools"][name]
    assert given["graph"]["priority"].pop("by_modality") == {"audio": "realtime"}
    assert given["graph"]["priority"].pop("client_classes") == ["interactive", "batch"]
    usual = StageSchedConfig().model_dump()
    del usual["graph"]["priority"]["by_modality"], usual["graph"]["priority"]["client_classes"]
    del (
        usual["runtime"]["connectors"],
        usual["runtime"]["edges"],
        usual["batching"]["stages"],
    )
    for name in config.pools.of_connectors:
        del usual["pools"][name]
    assert given == usual


def test_the_example_is_complete():
    def keys(value, at=""):
        if not isinstance(value, dict):
            return {at}
        return {key for name, inner in value.items() for key in keys(inner, f"{at}.{name}")} | {at}

    named = keys(yaml.safe_load(EXAMPLE.read_text()))
    defaults = StageSchedConfig().model_dump(exclude_none=True)
    assert keys(defaults) - named == set()


def test_the_deploy_yaml_may_name_a_file_beside_it(tmp_path):
    deploy(tmp_path, "balancing: {policy: least-queue}\n", "ours.yaml")
    config = load_stage_config(deploy(tmp_path, "omni_sched: ours.yaml\n"), {})
    assert config.balancing.policy is BalancePolicy.LEAST_QUEUE


def test_what_a_deploy_yaml_lacks_comes_from_its_base(tmp_path):
    deploy(tmp_path, "omni_sched: {runtime: {credits: {enabled: true, capacity: 5}}}\n", "base.yaml")
    config = load_stage_config(deploy(tmp_path, "base_config: base.yaml\n"), {})
    assert config.runtime.credits.capacity == 5
    off = deploy(tmp_path, "base_config: base.yaml\nomni_sched: off\n", "off.yaml")
    assert load_stage_config(off, {}) is None
    loop = deploy(tmp_path, "base_config: loop.yaml\n", "loop.yaml")
    with pytest.raises(ConfigError, match="'base_config' refers back to this file; remove it"):
        load_stage_config(loop, {})


def test_the_options_of_a_stage():
    config = read_stage_options(
        {"batching": {"hold_ms": 16, "stages": {"talker": {"hold_ms": 4}, 2: {"target_latency_ms": 200}}}}, "here"
    )
    of = config.batching.of_stage
    assert [of(0, "thinker").hold_ms, of(1, "talker").hold_ms] == [16, 4]
    assert [of(1, "talker").target_latency_ms, of(2, "code2wav").target_latency_ms] == [None, 200]
    assert control_of(config.batching, of(1, "talker"), 64) is None
    controller = control_of(config.batching, of(2, "code2wav"), 64)
    assert (controller.minimum, controller.maximum, controller.interval_seconds) == (1, 32, 1.0)
    check_against(config, {0: "thinker", 1: "talker", 2: "code2wav"})


@pytest.mark.parametrize("monitoring", [{"enabled": False}, {"anomaly": {"enabled": False}}])
def test_hangs_that_nobody_asked_for_need_no_monitoring(monitoring):
    assert read_stage_options({"monitoring": monitoring}, "here").runtime.recovery.hang_seconds == 60
    never = {"runtime": {"recovery": {"hang_seconds": None}}, "monitoring": monitoring}
    assert read_stage_options(never, "here").runtime.recovery.hang_seconds is None


def test_an_empty_section_has_its_defaults(tmp_path):
    text = "batching:\nruntime: {recovery: , edges: }\ngraph: {priority: {classes: }}\npools:\n"
    (tmp_path / "ours.yaml").write_text(text)
    assert load_stage_config(None, {VARIABLE: str(tmp_path / "ours.yaml")}) == StageSchedConfig()
    own = read_stage_options({"batching": {"stages": {"talker": None}}}, "here").batching
    assert own.of_stage(1, "talker") == StageSchedConfig().batching.of_stage(1, "talker")


ARTICLE = Path(__file__).parents[1] / "support" / "article.yaml"


def article():
    return load_stage_config(None, {VARIABLE: str(ARTICLE)})


def test_the_file_of_the_design_article_loads_as_it_is_printed():
    config = article()
    batches = config.batching.of_stage(1, "talker")
    assert (batches.min_batch_size, batches.max_batch_size) == (1, 32)
    assert (batches.target_latency_ms, batches.adjust_interval_ms) == (50, 1000)
    assert batches == BatchLimits(target_latency_ms=50)  # what it gives are the defaults of a controller
    assert {key: one.name for key, one in config.runtime.connectors.items()} == {
        "connector_small": "SharedMemoryConnector",
        "connector_large": "SharedMemoryConnector",
        "connector_distributed": "MooncakeConnector",
    }
    assert config.pools.of_connectors == {
        "text_pool_size": 256 << 20,
        "image_pool_size": 2 << 30,
        "audio_pool_size": 512 << 20,
        "pool_growth_factor": 1.5,
    }


def test_latency_target_and_interval_reach_the_controller_unswapped():
    config = read_stage_options({"latency_target": "70ms", "adjustment_interval": "3s", "max_batch_size": 9}, "here")
    limits = config.batching.of_stage(0)
    controller = control_of(config.batching, limits, 64)
    assert isinstance(controller, PidBatch)
    assert (controller.target_seconds, controller.interval_seconds) == (0.07, 3.0)
    assert (controller.minimum, controller.maximum) == (1, 9)
