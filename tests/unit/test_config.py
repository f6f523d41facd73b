"""Options: what is accepted, and that every refusal names the key and the nearest valid one."""

import pytest

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.load import load_config, resolved
from vllm_omni_sched.config.options import OmniSchedConfig, ReleaseMode, Toggle


def test_nothing_given_is_all_defaults():
    assert load_config({}) == load_config(None) == load_config({"other_plugin": 1}) == OmniSchedConfig()


def test_options_are_read():
    config = load_config({"omni_sched": {"windows": "on", "release": "keep", "metrics_interval_seconds": 2}})
    assert (config.windows, config.release, config.metrics_interval_seconds) == (Toggle.ON, ReleaseMode.KEEP, 2.0)


def test_a_yaml_file_may_be_named(tmp_path):
    path = tmp_path / "omni.yaml"
    path.write_text("session_delta: off\nrelease_batch_items: 8\n")  # YAML 1.1: a bare off is False
    config = load_config({"omni_sched": str(path)})
    assert (config.session_delta, config.release_batch_items) == (Toggle.OFF, 8)
    path.write_text("")
    assert load_config({"omni_sched": str(path)}) == OmniSchedConfig()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"window": "on"}, "unknown option 'window'; did you mean 'windows'?"),
        ({"qqqq": 1}, "unknown option 'qqqq'; known options: windows, "),
        ({"windows": "onn"}, r"'windows' must be one of \['auto', 'on', 'off'\], got 'onn'; did you mean 'on'"),
        ({"windows": 3}, "'windows' must be one of"),
        ({"release": "spil"}, "did you mean 'spill'"),
        ({"release_batch_items": 0}, "'release_batch_items'.*got 0; the nearest valid value is 1"),
        ({"release_batch_items": "8"}, "'release_batch_items': input should be a valid integer, got '8'"),
        ({"spill_max_bytes": -1}, "nearest valid value is 0"),
        ({"metrics_interval_seconds": 100}, "nearest valid value is 60"),
        ({"metrics": "yes"}, "'metrics': input should be a valid boolean"),
        ({"encoder_cache_order": "old"}, r"'encoder_cache_order' must be one of \['age', 'worth'\], got 'old'"),
        ({"encoder_cache_host_bytes": 1}, "'encoder_cache_host_bytes' is 1, but .* set 'encode_ahead' to true, or"),
        (
            {"encoder_cache_host_bytes": 1, "encode_ahead": True, "encoder_cache": "off"},
            "'encoder_cache_host_bytes' needs our encoder cache manager: set 'encoder_cache' to 'auto'",
        ),
        ({"encoder_cache_order": "worth", "encoder_cache": "off"}, "'encoder_cache_order' needs our encoder cache"),
        ("no/such/file.yaml", "names the file 'no/such/file.yaml', which cannot be read: No such file"),
        (3, "must be a mapping of options or the path of a YAML file, got int"),
    ],
)
def test_what_is_wrong_is_named(options, says):
    with pytest.raises(ConfigError, match=says):
        load_config({"omni_sched": options})


@pytest.mark.parametrize(
    "key",
    [
        "omnisched",
        "omni-sched",
        "Omni_Sched",
        "omni_shed",
        "omni_sced",
        "omni_scheduler",
        "vllm_omni_sched",
        "omni.sched",
    ],
)
@pytest.mark.parametrize("more", [{}, {"omni_sched": {}}])
def test_a_key_that_is_nearly_ours_is_told(key, more):
    with pytest.raises(ConfigError, match=f"the unknown key '{key}'; did you mean 'omni_sched'"):
        load_config({key: {"waiting_order": "sla"}, **more})


@pytest.mark.parametrize(
    "key", ["ascend_scheduler_config", "omni", "omni_kv_config", "sched", "torchair_graph_config", "scheduler", 3, None]
)
def test_keys_of_others_are_theirs(key):
    assert load_config({key: {}}) == OmniSchedConfig()


def test_resolved_options_are_as_they_are_written():
    found = {one.name: one for one in resolved(load_config({"omni_sched": {"release": "keep", "decode_pace": 1}}))}
    assert list(found) == list(OmniSchedConfig.model_fields)
    assert [str(one) for one in found.values() if one.given] == ["release=keep", "decode_pace=1.0"]
    assert str(found["client_classes"]) == 'client_classes=["interactive", "batch"]'
    assert (found["windows"].value, found["windows"].given) == ("auto", False)
    assert {one.name for one in resolved(load_config(None), group="video")} == {f"video.{name}" for name in found}


def test_additional_config_must_be_a_mapping():
    with pytest.raises(ConfigError, match=r"--additional-config must be a mapping .* got list; write it as"):
        load_config([])


@pytest.mark.parametrize("text", ["a: [", "- 1\n- 2\n", "just words"])
def test_a_yaml_file_that_is_no_mapping(tmp_path, text):
    path = tmp_path / "omni.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"omni\.yaml"):
        load_config({"omni_sched": str(path)})


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        ({}, 0.05),
        ({"control_target_ms": 80.0}, 0.05),  # nothing is steered at it
        ({"control_target_ms": 80.0, "prefill_control": "adaptive"}, 0.08),
        ({"control_target_ms": 30.0, "prefill_control": "adaptive"}, 0.05),
    ],
)
def test_the_lane_does_not_answer_for_steps_that_prompts_fill(options, seconds):
    assert OmniSchedConfig(**options).share_target_seconds == seconds
