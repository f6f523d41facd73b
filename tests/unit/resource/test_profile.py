"""`fit_profile`: its rules, one by one."""

import pytest

from vllm_omni_sched.config.load import load_config
from vllm_omni_sched.config.options import EvictionOrder, OmniSchedConfig
from vllm_omni_sched.resource.engine.lane import LaneFacts
from vllm_omni_sched.resource.engine.profile import fit_profile

ROOMY = LaneFacts()
REFUSED = LaneFacts(weights_change=True)
ENCODER_DECODER = LaneFacts(encoder_decoder=True)


def options(**given: object) -> OmniSchedConfig:
    return load_config({"omni_sched": given})


@pytest.mark.parametrize("profile", ["exact", "chat", "realtime", "video", "batch"])
def test_an_engine_that_can_have_all_of_a_profile_has_it(profile: str) -> None:
    config = options(profile=profile)
    fitted = fit_profile(config, ROOMY)
    assert fitted.config is config
    assert not fitted.withheld


def test_without_a_lane_there_are_rounds_and_a_reason() -> None:
    fitted = fit_profile(options(profile="chat"), REFUSED)
    assert (fitted.config.encode_ahead, fitted.config.encode_rounds) == (False, True)
    (withheld,) = fitted.withheld
    assert str(withheld) == (
        "encode_ahead stays off, because the weights may change while the lane encodes; encode_rounds is on instead"
    )


def test_rounds_that_the_operator_turned_off_stay_off() -> None:
    fitted = fit_profile(options(profile="chat", encode_rounds=False), REFUSED)
    assert (fitted.config.encode_ahead, fitted.config.encode_rounds) == (False, False)
    assert str(fitted.withheld[0]).endswith("the weights may change while the lane encodes")


def test_what_the_operator_set_is_kept_for_the_engine_to_refuse() -> None:
    fitted = fit_profile(options(profile="chat", encode_ahead=True), REFUSED)
    assert fitted.config.encode_ahead
    assert not fitted.withheld


def test_a_text_model_needs_no_lane_and_no_reason() -> None:
    fitted = fit_profile(options(profile="chat"), LaneFacts(multimodal=False, weights_change=True))
    assert not fitted.withheld
    assert not fitted.config.encode_rounds


def test_an_encoder_decoder_model_has_neither_rounds_nor_eviction_by_worth() -> None:
    chat = fit_profile(options(profile="chat"), ENCODER_DECODER)
    assert (chat.config.encode_ahead, chat.config.encode_rounds) == (False, False)
    batch = fit_profile(options(profile="batch"), ENCODER_DECODER)
    assert batch.config.encoder_cache_order is EvictionOrder.AGE
    assert [str(one) for one in batch.withheld] == [
        "encoder_cache_order stays off, because this is an encoder-decoder model"
    ]
