"""Options: what is accepted, and that every refusal names the key and the nearest valid one."""

import pytest

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.load import Source, grouped, load_config, resolved
from vllm_omni_sched.config.options import OmniSchedConfig, OrderMode, ReleaseMode, Toggle
from vllm_omni_sched.config.profiles import PROFILES, Profile
from vllm_omni_sched.config.stage_yaml import VARIABLE, load_stage_config


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
    path.write_text("{}\n")
    assert load_config({"omni_sched": str(path)}) == OmniSchedConfig()


@pytest.mark.parametrize("text", ["", "\n", "# nothing but a comment\n", "---\n"])
def test_an_empty_file_is_refused_by_its_name(tmp_path, text):
    path = tmp_path / "omni.yaml"
    path.write_text(text)
    says = "omni.yaml: is empty; write {} for the defaults, or do not name the file"
    with pytest.raises(ConfigError, match=says):
        load_config({"omni_sched": str(path)})
    with pytest.raises(ConfigError, match=says):
        load_stage_config(None, {VARIABLE: str(path)})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"nope": 1}, "unknown option 'nope'; known options: profile, expert.windows, "),
        ({"window": "on"}, "unknown option 'window'; did you mean 'expert.windows'?"),
        ({"qqqq": 1}, "unknown option 'qqqq'; known options: profile, expert.windows, "),
        ({"windows": "onn"}, r"'expert.windows' must be one of \['auto', 'on', 'off'\], got 'onn'; did you mean 'on'"),
        ({"windows": 3}, "'expert.windows' must be one of"),
        ({"release": "spil"}, "did you mean 'spill'"),
        ({"release_batch_items": 0}, "'expert.release_batch_items'.*got 0; the nearest valid value is 1"),
        ({"release_batch_items": "8"}, "'expert.release_batch_items': input should be a valid integer, got '8'"),
        ({"spill_max_bytes": -1}, "nearest valid value is 0"),
        ({"metrics_interval_seconds": 100}, "nearest valid value is 60"),
        ({"metrics": "yes"}, "'metrics': input should be a valid boolean"),
        ({"encoder_cache_host_bytes": 1}, "'encoder_cache_host_bytes' is 1, but .* set 'encode_ahead' to true, or"),
        (
            {"encoder_cache_host_bytes": 1, "encode_ahead": True, "encoder_cache": "off"},
            "'encoder_cache_host_bytes' needs our encoder cache manager: set 'expert.encoder_cache' to 'auto'",
        ),
        ("no/such/file.yaml", "names the file 'no/such/file.yaml', which cannot be read: No such file"),
        ("chatt", "names 'chatt', which is neither a profile nor a file; did you mean 'chat'"),
        ("x", "neither a profile nor a file; profiles are exact, chat, realtime, video"),
        ({"profile": "chatt"}, "'profile' must be one of .*, got 'chatt'; did you mean 'chat'"),
        ({"expert": 3}, "'expert' must be a mapping of options, got 3"),
        ({"expert": {"encode_ahead": True}}, "'encode_ahead' does not belong to the group 'expert': move it out of it"),
        ({"expert": {"decode_pase": 1}}, "unknown option 'decode_pase'; did you mean 'expert.decode_pace'"),
        ({"windows": "on", "expert": {"windows": "on"}}, "'windows' is given twice, in the group 'expert' and outside"),
        (3, "must be a mapping of options, a profile or the path of a YAML file, got int"),
    ],
)
def test_what_is_wrong_is_named(options, says):
    with pytest.raises(ConfigError, match=says):
        load_config({"omni_sched": options})


def test_options_of_the_group_expert_are_read_outside_it_too_and_noted():
    inside = load_config({"omni_sched": {"expert": {"windows": "off"}}})
    outside = load_config({"omni_sched": {"windows": "off"}})
    assert inside.windows is outside.windows is Toggle.OFF
    assert (inside.misplaced, outside.misplaced) == ((), ("windows",))


def test_a_profile_sets_options_and_single_options_win():
    short, long = load_config({"omni_sched": "chat"}), load_config({"omni_sched": {"profile": "chat"}})
    assert short == long
    assert short.encode_ahead
    assert set(short.from_profile()) == set(PROFILES[Profile.CHAT].options)
    mine = load_config({"omni_sched": {"profile": "chat", "encode_ahead": False, "control_target_ms": 33}})
    assert (mine.encode_ahead, mine.control_target_ms, mine.waiting_order) == (False, 33.0, OrderMode.SLA)
    sources = {one.name: one.source for one in resolved(mine)}
    assert sources["control_target_ms"] is Source.GIVEN
    assert sources["waiting_order"] is Source.PROFILE
    assert sources["release"] is Source.DEFAULT


def test_the_profile_exact_is_the_default_and_sets_nothing():
    assert load_config({"omni_sched": "exact"}).model_dump() == OmniSchedConfig().model_dump()
    assert not load_config({"omni_sched": "exact"}).from_profile()


@pytest.mark.parametrize("profile", list(Profile))
def test_what_a_profile_sets_is_valid(profile):
    config = load_config({"omni_sched": profile.value})
    assert set(config.from_profile()) == set(PROFILES[profile].options)


@pytest.mark.parametrize(
    ("given", "left_out"),
    [({"profile": "chat", "encode_rounds": True}, "encode_ahead")],
)  # fmt: skip
def test_an_option_that_excludes_one_of_the_profile_wins(given, left_out):
    config = load_config({"omni_sched": given})
    assert left_out not in config.from_profile()
    assert getattr(config, left_out) == getattr(OmniSchedConfig(), left_out)


def test_options_are_written_in_their_groups():
    assert grouped({"pieces": True, "release": "keep"}) == {"release": "keep", "expert": {"pieces": True}}
    assert grouped({"release": "keep"}) == {"release": "keep"}
    assert grouped({"windows": "on", "expert": {"pieces": True}}) == {"expert": {"pieces": True, "windows": "on"}}


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


def test_resolved_options_are_as_they_are_written():
    found = {
        one.name: one
        for one in resolved(load_config({"omni_sched": {"release": "keep", "expert": {"decode_pace": 1}}}))
    }
    assert [name.removeprefix("expert.") for name in found] == list(OmniSchedConfig.model_fields)
    assert [str(one) for one in found.values() if one.given] == ["release=keep", "expert.decode_pace=1.0"]
    assert str(found["client_classes"]) == 'client_classes=["interactive", "batch"]'
    assert (found["expert.windows"].value, found["expert.windows"].given) == ("auto", False)
    assert {one.name for one in resolved(load_config(None), group="video")} == {f"video.{name}" for name in found}


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
