"""`obstacle` and `refusal`: which engines may not encode ahead, why, and what the operator can do about it."""

from pathlib import Path

import pytest

from vllm_omni_sched.resource.engine.lane import LaneFacts, obstacle, refusal

REFUSED = [
    (LaneFacts(connectors_hold_back=False, vllm="0.22.1"), "connectors of vLLM 0.22.1 cannot hold requests back", ""),
    (
        LaneFacts(runner_runs_connectors=False, vllm="0.30.0"),
        "model runner V2 of vLLM 0.30.0 does not run connectors in every step",
        "",
    ),
    (LaneFacts(device="xpu"), "the device 'xpu' is not supported", ""),
    (
        LaneFacts(compiled_encoder=True),
        "a compiled encoder cannot yield to decode steps",
        "leave compile_mm_encoder out",
    ),
    (
        LaneFacts(graphs_of_unknown_sizes=True),
        "vLLM chooses the sizes of the encoder's CUDA graphs while it starts, and the scheduler must know them to "
        "leave those items to the step",
        "name them in encoder_cudagraph_token_budgets",
    ),
    (
        LaneFacts(encodes_only=True),
        "this engine only encodes (ec_role 'ec_producer'), so no request decodes beside an encode",
        "set ec_role to 'ec_both'",
    ),
    (
        LaneFacts(groups=2),
        "of several pipeline stages or context-parallel groups, only the first has the encoder",
        "",
    ),
    (
        LaneFacts(workers=2),
        "the lanes of several GPUs would each need a stream and a process group of their own, which no machine with "
        "GPUs has tried",
        "",
    ),
    (
        LaneFacts(workers=2, device="cpu", spread=True),
        "its workers encode together, and may be on several hosts",
        "",
    ),
    (
        LaneFacts(workers=2, device="cpu", reports_of_all_workers=False, vllm="0.30.0"),
        "vLLM 0.30.0 reads the reports of one worker only",
        "",
    ),
    (
        LaneFacts(encoder_lora=True),
        "the encoder may have LoRA weights, which vLLM activates for the items of one step at a time",
        "leave --enable-tower-connector-lora out",
    ),
    (LaneFacts(encoder_decoder=True), "this is an encoder-decoder model", ""),
    (
        LaneFacts(sets_context="Thinker"),
        "Thinker sets vLLM's forward context while it encodes, and there is one for all threads of a process",
        "",
    ),
    (
        LaneFacts(one_buffer=True),
        "all FlashInfer attention of the encoder works in one buffer",
        "choose another --mm-encoder-attn-backend",
    ),
]


@pytest.mark.parametrize(("facts", "reason", "remedy"), REFUSED, ids=[reason for _, reason, _ in REFUSED])
def test_each_obstacle_has_a_reason_and_what_removes_it(facts: LaneFacts, reason: str, remedy: str) -> None:
    found = obstacle(facts)
    assert found is not None
    assert (found.reason, found.remedy) == (reason, remedy)
    fix = f"{remedy}, or set it to false" if remedy else "set it to false"
    assert refusal(facts) == f"option 'encode_ahead' cannot be on here, because {reason}: {fix}"


def test_an_engine_with_nothing_against_it_is_not_refused() -> None:
    assert obstacle(LaneFacts()) is None
    assert obstacle(LaneFacts(workers=2, device="cpu")) is None
    assert refusal(LaneFacts(device="cpu")) is None
    assert obstacle(LaneFacts(device="cpu", sets_context="Thinker", one_buffer=True)) is None  # a process of its own


@pytest.mark.parametrize("facts", [facts for facts, _, _ in REFUSED], ids=[reason for _, reason, _ in REFUSED])
def test_a_text_model_has_no_use_for_a_lane_and_is_not_refused(facts: LaneFacts) -> None:
    assert obstacle(LaneFacts(**{**vars(facts), "multimodal": False})) is None


TABLE = (Path(__file__).parents[3] / "docs/compatibility.md").read_text()


@pytest.mark.parametrize("reason", [reason for facts, reason, _ in REFUSED if not facts.vllm and facts.device != "xpu"])
def test_the_documentation_has_the_reason(reason: str) -> None:
    assert f"| refused | {reason.replace('Thinker', 'the model')}" in TABLE
