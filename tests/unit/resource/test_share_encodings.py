"""Where `encoder_share_bytes` is refused."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_omni_sched.resource.engine.lane import LaneFacts
from vllm_omni_sched.resource.engine.share_encodings import share_refusal


@pytest.mark.parametrize(
    ("facts", "operators", "why"),
    [
        ({"connectors_hold_back": False, "vllm": "0.22"}, None, "connectors of vLLM 0.22 cannot hold requests back"),
        ({"runner_runs_connectors": False}, None, "model runner V2"),
        ({}, "Theirs", "--ec-transfer-config names Theirs"),
        ({"workers": 2, "spread": True}, None, "several hosts"),
        ({"groups": 2}, None, "only the first has the encoder"),
        ({"encoder_lora": True}, None, "different adapters"),
        ({"encoder_decoder": True}, None, "encoder-decoder"),
    ],
)
def test_a_store_that_could_be_wrong_is_refused(facts: dict[str, Any], operators: str | None, why: str) -> None:
    refused = share_refusal(LaneFacts(**facts), operators)
    assert refused is not None
    assert why in refused
    assert refused.startswith("option 'encoder_share_bytes' cannot be used here, because ")
    assert refused.endswith(": leave it out, or set it to 0")


@pytest.mark.parametrize("facts", [{}, {"workers": 2}, {"device": "cpu"}, {"multimodal": False, "encoder_lora": True}])
def test_other_engines_may_share(facts: dict[str, Any]) -> None:
    assert share_refusal(LaneFacts(**facts), None) is None
