"""What a request is to the policies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

from tests.support.omni_stages import core_request, params
from vllm_omni_sched.config.stage_options.graph import ClassTargets, PriorityOptions
from vllm_omni_sched.omni.stages.requests import (
    UNKNOWN_TOKENS,
    Classes,
    features_of,
    keys_of,
    modality_of,
)

pytestmark = pytest.mark.omni


def request(*modalities: str, data: Any = None) -> Any:
    items = [
        MultiModalFeatureSpec(data, modality, f"{modality}{i}", PlaceholderRange(offset=i, length=1))
        for i, modality in enumerate(modalities)
    ]
    return core_request("a", [1, 2, 3], params(), mm_features=items or None)


def named(name: str | None) -> Any:
    return params(extra_args={"omni_class": name} if name else None)


def test_a_request_has_the_class_that_it_names() -> None:
    classes = Classes(PriorityOptions())
    assert classes.of(named("realtime"), "text").name == "realtime"
    assert classes.of(named(None), "text").name == "interactive"
    assert classes.of(named("no such class"), "text").name == "interactive"
    assert classes.of(SimpleNamespace(extra_args="nonsense"), "text").name == "interactive"


def test_else_that_of_its_modality() -> None:
    classes = Classes(PriorityOptions(by_modality={"audio": "realtime"}))
    assert classes.of(named(None), "audio").name == "realtime"
    assert classes.of(named("batch"), "audio").name == "batch"
    assert classes.of(named(None), "image").name == "interactive"


def test_the_worst_of_several_ranks_is_low() -> None:
    classes = Classes(PriorityOptions())
    assert [classes.is_low(classes.of(named(name), "text")) for name in ("realtime", "interactive", "batch")] == [
        False,
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("targets", "seconds"),
    [({"ttft_ms": 300.0}, 0.3), ({"e2e_ms": 900.0}, 0.9), ({"ttft_ms": 300.0, "e2e_ms": 900.0}, 0.9)],
)
def test_a_path_ends_with_its_last_output_and_where_none_is_promised_with_the_first(
    targets: dict[str, float], seconds: float
) -> None:
    classes = Classes(PriorityOptions(classes={"a": ClassTargets(**targets)}, default_class="a"))
    assert classes.default.ttft_seconds == pytest.approx(seconds)


def test_keys_are_its_user_and_its_items() -> None:
    assert keys_of(request("image", "audio"), params(extra_args={"omni_user": 7})) == {
        "item image0",
        "item audio1",
        "user 7",
    }
    assert keys_of("a diffusion prompt", params()) == frozenset()


@pytest.mark.parametrize(
    ("modalities", "found"),
    [((), "text"), (("image",), "image"), (("image", "audio"), "audio"), (("audio", "video"), "video")],
)
def test_its_modality_is_the_heaviest_of_its_items(modalities: tuple[str, ...], found: str) -> None:
    assert modality_of(request(*modalities)) == found


def test_features_of_a_request_for_tokens() -> None:
    found = features_of(request("image"), params(max_tokens=5))
    assert (found.prompt_tokens, found.output_tokens, found.items, found.steps) == (3, 5, 1, 0)
    assert features_of(request(), params(max_tokens=None)).output_tokens == UNKNOWN_TOKENS
    assert features_of(None, params()).prompt_tokens == 0


def test_features_of_a_request_for_pictures() -> None:
    given = OmniDiffusionSamplingParams(width=64, height=32, num_inference_steps=4, num_outputs_per_prompt=2)
    found = features_of("a cat", given)
    assert (found.pixels, found.steps, found.output_tokens, found.prompt_tokens) == (64 * 32 * 2, 4, 0, 0)
