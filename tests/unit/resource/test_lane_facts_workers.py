"""Which engines with several workers may encode ahead."""

import pytest

from vllm_omni_sched.resource.engine.lane import LaneFacts, obstacle, refusal

SPLIT = {"workers": 2, "device": "cpu"}


def test_ranks_on_cpus_of_one_host_encode_together():
    assert obstacle(LaneFacts(**SPLIT)) is None


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({**SPLIT, "device": "cuda"}, "the lanes of several GPUs would each need a stream and a process group"),
        ({**SPLIT, "spread": True}, "may be on several hosts"),
        ({**SPLIT, "reports_of_all_workers": False, "vllm": "0.29.0"}, "vLLM 0.29.0 reads the reports of one worker"),
        ({**SPLIT, "groups": 2}, "of several pipeline stages or context-parallel groups, only the first"),
        ({"groups": 2, "device": "cpu"}, "of several pipeline stages or context-parallel groups, only the first"),
    ],
)
def test_others_are_refused_with_the_reason(facts: dict[str, object], reason: str):
    found = refusal(LaneFacts(**facts))  # type: ignore[arg-type]
    assert found is not None
    assert reason in found
    assert found.endswith(": set it to false")


@pytest.mark.parametrize("alone", [{"spread": True}, {"reports_of_all_workers": False}, {"device": "cuda"}])
def test_what_several_workers_need_does_not_concern_one(alone: dict[str, object]):
    assert obstacle(LaneFacts(**alone)) is None  # type: ignore[arg-type]
