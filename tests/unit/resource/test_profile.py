"""`fit_profile`: what a profile turns on under which facts, and why the rest stays off."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_omni_sched.config.load import load_config
from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.config.profiles import MEANINGS, PROFILES
from vllm_omni_sched.resource.engine.lane import LaneFacts, refusal
from vllm_omni_sched.resource.engine.profile import (
    RUST,
    VIDEO_LOADER,
    FrontEndFacts,
    fit_profile,
    front_end_refusal,
)

ROOMY = LaneFacts()
CONTEXT = LaneFacts(sets_context="Thinker")
WHY_CONTEXT = "Thinker sets vLLM's forward context while it encodes, and there is one for all threads of a process"
TEXT_ALONE = "this model takes text alone"


def options(**given: object) -> OmniSchedConfig:
    return load_config({"omni_sched": given})


@pytest.mark.parametrize("profile", ["exact", "chat", "realtime", "video"])
def test_an_engine_that_can_have_all_of_a_profile_has_it(profile: str) -> None:
    config = options(profile=profile)
    fitted = fit_profile(config, ROOMY)
    assert fitted.config is config
    assert not fitted.withheld
    assert fitted.video_loader is (profile == "video")


@pytest.mark.parametrize("profile", ["chat", "realtime", "video"])
@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"sets_context": "Thinker"}, WHY_CONTEXT),
        ({"one_buffer": True}, "all FlashInfer attention of the encoder works in one buffer"),
        ({"workers": 2}, "the lanes of several GPUs would each need a stream and a process group of their own"),
        ({"groups": 2}, "of several pipeline stages or context-parallel groups, only the first has the encoder"),
        ({"encoder_lora": True}, "the encoder may have LoRA weights"),
        ({"compiled_encoder": True}, "a compiled encoder cannot yield to decode steps"),
        ({"graphs_of_unknown_sizes": True}, "vLLM chooses the sizes of the encoder's CUDA graphs while it starts"),
        ({"encodes_only": True}, "this engine only encodes (ec_role 'ec_producer')"),
        ({"encoder_decoder": True}, "this is an encoder-decoder model"),
        ({"multimodal": False}, TEXT_ALONE),
        ({"items_with_workers": True}, "the processor cache keeps items in shared memory that belongs to the workers"),
        ({"sets_context": "Thinker", "device": "cpu"}, None),
        ({"one_buffer": True, "device": "cpu"}, None),
        ({"workers": 2, "device": "cpu"}, None),
    ],
)
def test_the_facts_decide_whether_a_profile_encodes_ahead(
    profile: str, facts: dict[str, Any], reason: str | None
) -> None:
    fitted = fit_profile(options(profile=profile), LaneFacts(**facts))
    assert fitted.config.encode_ahead is (reason is None)
    assert [one.reason.startswith(reason or "?") for one in fitted.withheld if one.option == "encode_ahead"] == (
        [] if reason is None else [True]
    )
    kept = {"waiting_order": "sla", "prefill_control": "adaptive", "slo_metrics": True, "encode_rounds": False}
    assert {name: getattr(fitted.config, name) for name in kept} == kept
    assert fitted.config.from_profile().keys() == PROFILES[fitted.config.profile].options.keys()


def test_what_stays_off_is_said_with_the_reason() -> None:
    (withheld,) = fit_profile(options(profile="chat"), CONTEXT).withheld
    assert str(withheld) == f"encode_ahead stays off, because {WHY_CONTEXT}"


def test_what_the_operator_set_is_kept_for_the_engine_to_refuse() -> None:
    fitted = fit_profile(options(profile="chat", encode_ahead=True), CONTEXT)
    assert fitted.config.encode_ahead
    assert not fitted.withheld
    assert refusal(CONTEXT) == f"option 'encode_ahead' cannot be on here, because {WHY_CONTEXT}: set it to false"


@pytest.mark.parametrize(
    ("lane", "front_end", "reason"),
    [
        (ROOMY, FrontEndFacts(), None),
        (LaneFacts(multimodal=False), FrontEndFacts(), TEXT_ALONE),
        (ROOMY, FrontEndFacts(rust=True), RUST),
        (ROOMY, FrontEndFacts(decoder="the loader 'x' is named"), "the loader 'x' is named"),
        (ROOMY, FrontEndFacts(pyav="pip install av"), "PyAV is not installed: pip install av"),
    ],
)
def test_videos_are_decoded_by_ours_unless_something_speaks_against_it(
    lane: LaneFacts, front_end: FrontEndFacts, reason: str | None
) -> None:
    fitted = fit_profile(options(profile="video"), lane, front_end)
    assert fitted.video_loader is (reason is None)
    found = {one.option: one.reason for one in fitted.withheld}
    assert found.get(VIDEO_LOADER) == reason


@pytest.mark.parametrize(
    ("given", "off"),
    [
        ({}, ["metrics"]),
        ({"metrics": False}, []),
        ({"profile": "chat"}, ["metrics", "slo_metrics"]),
        ({"profile": "chat", "slo_metrics": False}, ["metrics"]),
        ({"metrics": True}, []),
    ],
)
def test_under_rust_nothing_is_measured_that_nobody_shows(given: dict[str, Any], off: list[str]) -> None:
    fitted = fit_profile(options(**given), ROOMY, FrontEndFacts(rust=True))
    assert [(one.option, one.reason) for one in fitted.withheld] == [(name, RUST) for name in off]
    assert not any(getattr(fitted.config, name) for name in off)


@pytest.mark.parametrize(
    ("given", "processes", "refused"),
    [
        ({"profile": "chat"}, 0, None),
        ({"metrics": False, "slo_metrics": False}, 0, None),
        ({"metrics": True}, 0, "metrics"),
        ({"slo_metrics": True}, 2, "slo_metrics"),
        ({}, 2, "preprocess.processes"),
    ],
)
def test_under_rust_what_the_operator_asked_for_is_refused(
    given: dict[str, Any], processes: int, refused: str | None
) -> None:
    why = front_end_refusal(options(**given), processes=processes)
    assert (why is None) is (refused is None)
    assert why is None or why.startswith(f"option {refused!r} cannot work here, because {RUST}: leave it out, or ")


def test_every_option_of_a_profile_has_words_or_is_a_target() -> None:
    chosen = {name for settings in PROFILES.values() for name in settings.options}
    assert {name for name in chosen - MEANINGS.keys() if not name.endswith("_ms")} == set()
    assert MEANINGS.keys() <= chosen
