"""Keys of content: equal work has equal keys, and only equal work."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm_omni.engine.orchestrator import OrchestratorRequestState
from vllm_omni.engine.serialization import serialize_additional_information
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

from tests.support.omni_stages import DELTA, core_request, params
from vllm_omni_sched.omni.stages.content import first_key, next_key

pytestmark = pytest.mark.omni


def state_of(name: str, each: list[Any], prompt: Any = None, ends: int | None = None) -> OrchestratorRequestState:
    final = len(each) - 1 if ends is None else ends
    prompt = {"prompt_token_ids": [1, 2]} if prompt is None else prompt
    return OrchestratorRequestState(name, prompt, each, final, {final})


def key(
    name: str = "a",
    *,
    each: list[Any] | None = None,
    tokens: tuple[int, ...] = (1, 2),
    prompt: Any = None,
    until: int = 0,
    ends: int | None = None,
    **request: Any,
) -> str | None:
    each = each or [params(), params()]
    return first_key(
        state_of(name, each, prompt, ends), core_request(name, tokens, each[0], **request), range(until + 1)
    )


def item(identifier: str, offset: int = 0) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset=offset, length=1))


def lora(number: int) -> LoRARequest:
    return LoRARequest(f"lora{number}", number, f"/loras/{number}")


def information(request_id: str, voice: str = "low") -> Any:
    return serialize_additional_information({"global_request_id": [request_id], "voice": [voice]})


@pytest.mark.parametrize(
    "same",
    [
        {},
        {"each": [params(temperature=1.0, seed=7)]},
        {"mm_features": [item("p1")]},
        {"lora_request": lora(1)},
        {"cache_salt": "s"},
        {"additional_information": information("x")},
        {"prompt": "a text"},
        {"prompt": {"prompt": "a text", "additional_information": {"n": [1, 2.5, None, True]}}},
    ],
    ids=lambda same: ",".join(same) or "tokens",
)
def test_equal_content_has_equal_keys(same: dict[str, Any]) -> None:
    assert key("a", **same) == key("b", **same) is not None


@pytest.mark.parametrize(
    "other",
    [
        {"tokens": (1, 3)},
        {"tokens": (1, 2, 2)},
        {"prompt": {"prompt_token_ids": [1, 2], "voice": "high"}},
        {"mm_features": [item("p2")]},
        {"mm_features": [item("p1", offset=1)]},
        {"mm_features": [item("p1"), item("p1", offset=1)]},
        {"lora_request": lora(1)},
        {"lora_request": lora(2)},
        {"cache_salt": "s"},
        {"additional_information": information("x", "high")},
        {"model_intermediate_buffer": {"speaker": "a"}},
        {"ends": 0},
        {"each": [params(max_tokens=15), params()]},
        {"each": [params(temperature=1.0, seed=1), params()]},
        {"each": [params(temperature=1.0, seed=2), params()]},
        {"each": [params(temperature=0.5, seed=2), params()]},
        {"each": [params(stop=["x"]), params()]},
        {"each": [params(logprobs=1), params()]},
        {"each": [params(output_kind=DELTA), params()]},
        {"each": [params(extra_args={"speaker": "a"}), params()]},
    ],
    ids=str,
)
def test_other_content_has_another_key(other: dict[str, Any]) -> None:
    assert key(**other) is not None
    assert key(**other) != key()
    if "mm_features" in other:
        assert key(**other) != key(mm_features=[item("p1")])


def test_all_other_contents_differ_from_each_other() -> None:
    keys = [key(each=[params(temperature=t, seed=s)]) for t in (0.5, 1.0) for s in (1, 2)]
    keys += [key(lora_request=lora(number)) for number in (1, 2)]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    "drawn", [{"temperature": 1.0}, {"temperature": 0.01}, {"temperature": 1.0, "seed": 1, "n": 2}]
)
def test_what_is_drawn_without_a_seed_has_no_key(drawn: dict[str, Any]) -> None:
    assert key(each=[params(**drawn)]) is None
    assert next_key(state_of("a", [params(), params(**drawn)]), 1, "up") is None


def test_only_stages_up_to_the_last_one_that_matters_count() -> None:
    drawn = [params(), params(temperature=1.0)]
    assert key(each=drawn, until=0) is not None
    assert key(each=drawn, until=1) is None
    assert key(each=[params(), params(max_tokens=3)]) == key()
    assert key(each=[params(), params(max_tokens=3)], until=1) != key(until=1)


def test_our_own_words_do_not_count() -> None:
    urgent = {"omni_class": "realtime", "omni_user": "u"}
    assert key(each=[params(extra_args=urgent)]) == key(each=[params()])
    assert key(each=[params(extra_args=urgent | {"x": 1})]) == key(each=[params(extra_args={"x": 1})])


def test_names_of_requests_do_not_count() -> None:
    assert key("a", additional_information=information("a")) == key("b", additional_information=information("b"))
    prompts = [{"prompt_token_ids": [1], "additional_information": {"global_request_id": [name]}} for name in "ab"]
    assert key("a", prompt=prompts[0]) == key("b", prompt=prompts[1]) is not None


def test_what_cannot_be_told_has_no_key() -> None:
    assert key(prompt_embeds=torch.zeros(2, 4)) is None
    assert key(prompt={"prompt_token_ids": [1], "voice": object()}) is None
    assert key(each=[params(extra_args={"x": object()})]) is None
    assert next_key(state_of("a", [params(), params(extra_args={"x": object()})]), 1, "up") is None


def test_a_later_key_follows_from_the_one_before_the_stage_and_its_parameters() -> None:
    each = [params()] * 3
    one = next_key(state_of("a", each), 1, "up")
    assert one == next_key(state_of("b", each), 1, "up") is not None
    assert one != next_key(state_of("a", each), 1, "another")
    assert one != next_key(state_of("a", each), 2, "up")
    assert one != next_key(state_of("a", [params(), params(max_tokens=2), params()]), 1, "up")


def test_a_picture_with_a_seed_has_a_key_and_one_without_has_none() -> None:
    def drawn(**how: Any) -> str | None:
        given = OmniDiffusionSamplingParams(**how)
        return first_key(state_of("a", [given], "a cat"), "a cat", [0])

    assert drawn(seed=1, num_inference_steps=4) == drawn(seed=1, num_inference_steps=4) is not None
    assert drawn(seed=1, num_inference_steps=4) != drawn(seed=1, num_inference_steps=5)
    assert drawn(num_inference_steps=4) is None


def picture(level: int = 1, **how: Any) -> Image.Image:
    made = Image.new(how.pop("mode", "L"), how.pop("size", (4, 2)), level)
    made.getexif().update(how.pop("exif", {}))
    return made


def contents() -> list[Any]:
    return [
        np.zeros(4, np.float32),
        np.zeros(4, np.int32),
        np.zeros((2, 2), np.float32),
        np.ones(4, np.float32),
        np.float32(0.0),
        torch.zeros(4),
        torch.zeros(4, dtype=torch.bfloat16),
        torch.zeros(2, 2),
        torch.ones(4),
        torch.tensor(0.0),
        picture(),
        picture(2),
        picture(size=(2, 4)),
        picture(mode="P"),
        picture(exif={0x0112: 6}),
        (np.zeros(4, np.float32), 16000),
        (np.zeros(4, np.float32), 8000),
    ]


def with_data(data: Any, **request: Any) -> str | None:
    return key(prompt={"prompt_token_ids": [1, 2], "multi_modal_data": {"image": data}}, **request)


def test_arrays_tensors_and_pictures_count_by_what_they_hold() -> None:
    keys = [with_data(one) for one in contents()]
    assert None not in keys
    assert len(set(keys)) == len(keys)
    assert keys == [with_data(one) for one in contents()]
    every_other = np.arange(8, dtype=np.float32)[::2]
    assert with_data(every_other) == with_data(every_other.copy())
    assert with_data(torch.arange(8)[::2]) == with_data(torch.arange(8)[::2].clone())


def test_what_holds_something_that_cannot_be_told_has_no_key() -> None:
    assert with_data(np.array([object()])) is None
    assert with_data(torch.zeros(4).to_sparse()) is None
    assert with_data([picture(), object()]) is None


def test_items_that_the_request_names_count_by_their_names() -> None:
    named = [item("p1"), item("p2", offset=1)]
    pictures = [object(), object()]  # not looked at
    assert with_data(pictures, mm_features=named) is not None
    assert with_data(pictures, mm_features=named) == with_data([object(), object()], mm_features=named)
    assert with_data(pictures, mm_features=named) != with_data(pictures, mm_features=named[::-1])
    assert with_data(pictures, mm_features=named[:1]) is None, "one of them has no name"


def test_the_same_picture_is_drawn_from_once() -> None:
    """A diffusion stage that comes first gets pictures as they are."""
    given = OmniDiffusionSamplingParams(seed=1)

    def drawn(level: int) -> str | None:
        prompt = {"prompt": "a cat", "multi_modal_data": {"image": picture(level)}}
        return first_key(state_of("a", [given], prompt), prompt, [0])

    assert drawn(1) == drawn(1) is not None
    assert drawn(1) != drawn(2)
