"""Names that may be meant by one that is unknown."""

import pytest

from vllm_omni_sched.config.nearest import did_you_mean, is_misspelt


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("windws", "did you mean 'windows'?"),
        ("a100", "did you mean 'a100-80gb' or 'a100-40gb'?"),
        ("", ""),
        ("nothing like it", ""),
    ],
)
def test_names_that_may_be_meant_are_asked_for(name, said):
    assert did_you_mean(name, ["windows", "a100-80gb", "a100-40gb"]) == said


def test_a_name_is_asked_for_as_the_user_writes_it():
    assert did_you_mean("lm", ["llm"], lambda one: f"stages.{one}") == "did you mean 'stages.llm'?"


@pytest.mark.parametrize(("name", "misspelt"), [("ring_byte", True), ("ring", False), ("rng_bytes", True), ("", False)])
def test_a_name_that_others_may_use_is_misspelt_if_it_is_nearly_ours(name, misspelt):
    assert is_misspelt(name, ["ring_bytes", "stall_seconds"]) is misspelt
