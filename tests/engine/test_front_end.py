"""Which front ends check requests, and with which error, without starting an engine."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams

from vllm_omni_sched import compat
from vllm_omni_sched.config.errors import RequestError
from vllm_omni_sched.engine import front_end

BAD = SamplingParams(extra_args={"omni_class": "vip"})


@pytest.fixture
def classes(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What stands for vLLM's classes; `seen` is what came through to them."""
    seen: list[Any] = []

    class InputProcessor:
        def __init__(self, vllm_config: Any) -> None:
            self.vllm_config = vllm_config

        def process_inputs(self, request_id: str, prompt: Any, params: Any, **_: Any) -> str:
            seen.append(params)
            return request_id

    class AsyncLLM:
        def __init__(self, input_processor: Any) -> None:
            self.input_processor = input_processor

        async def generate(self, prompt: Any, sampling_params: Any, request_id: str) -> Any:
            seen.append(sampling_params)
            yield request_id

    found = {"InputProcessor": InputProcessor, "AsyncLLM": AsyncLLM, "OpenAIServingResponses": type("None", (), {})}
    real = compat.find
    monkeypatch.setattr(compat, "find", lambda module, path: found.get(path) or real(module, path))
    return SimpleNamespace(InputProcessor=InputProcessor, AsyncLLM=AsyncLLM, seen=seen, found=found)


def config(scheduler_cls: str | None, **options: Any) -> Any:
    scheduler = SimpleNamespace(scheduler_cls=scheduler_cls)
    return SimpleNamespace(scheduler_config=scheduler, additional_config={"omni_sched": options})


OURS = "vllm_omni_sched.OmniScheduler"


def test_what_makes_no_sense_is_vllm_s_error_of_validation(classes):
    front_end.check_requests()
    processor = classes.InputProcessor(config(OURS))
    for call in (
        lambda: processor.process_inputs("a", "hello", BAD),
        lambda: processor.process_inputs(request_id="a", prompt="hello", params=BAD, resumable=True),
        lambda: classes.AsyncLLM(processor).generate("hello", BAD, "a"),  # before anybody asks for its first output
        lambda: classes.AsyncLLM(processor).generate(prompt="hello", sampling_params=BAD, request_id="a"),
    ):
        with pytest.raises(RequestError, match="omni_class is 'vip'") as refused:
            call()
        assert isinstance(refused.value, VLLMValidationError)  # which vLLM's servers answer with HTTP 400
        assert refused.value.parameter is None  # as its handlers read it
    assert classes.seen == []


@pytest.mark.asyncio
async def test_what_makes_sense_goes_through(classes):
    front_end.check_requests()
    processor = classes.InputProcessor(config(OURS, client_classes=["realtime"]))
    good = SamplingParams(extra_args={"omni_class": "realtime", "others": [1]})
    assert processor.process_inputs("a", "hello", good) == "a"
    assert processor.process_inputs("b", "hello", PoolingParams()) == "b"
    assert [one async for one in classes.AsyncLLM(processor).generate("hello", good, "c")] == ["c"]
    assert classes.seen[::2] == [good, good]


@pytest.mark.asyncio
@pytest.mark.parametrize("owner", ["input_processor", "engine"])
async def test_responses_are_refused_before_they_are_begun(classes, monkeypatch, owner):
    class OpenAIServingResponses:
        def __init__(self, **client: Any) -> None:
            self.engine_client = SimpleNamespace(**client)

        async def create_responses(self, request: Any, raw_request: Any = None) -> Any:
            return request

    classes.found["OpenAIServingResponses"] = OpenAIServingResponses
    monkeypatch.setitem(sys.modules, compat.RESPONSES, ModuleType("serving"))  # this process is a server
    front_end.check_requests()
    holder = SimpleNamespace(omni_promises=classes.InputProcessor(config(OURS)).omni_promises)
    bad, good = (SimpleNamespace(vllm_xargs=xargs) for xargs in ({"omni_class": "vip"}, None))
    with pytest.raises(VLLMValidationError, match="omni_class is 'vip'"):
        await OpenAIServingResponses(**{owner: holder}).create_responses(bad)
    assert await OpenAIServingResponses(**{owner: holder}).create_responses(good) is good
    assert await OpenAIServingResponses(**{owner: object()}).create_responses(bad, None) is bad


@pytest.mark.parametrize("scheduler_cls", [None, "vllm.v1.core.sched.scheduler.Scheduler"])
def test_an_engine_with_another_scheduler_is_as_it_was(classes, scheduler_cls):
    front_end.check_requests()  # another engine of this process has ours
    processor = classes.InputProcessor(config(scheduler_cls))
    assert not hasattr(processor, "omni_promises")
    assert processor.process_inputs("a", "hello", BAD) == "a"
    classes.AsyncLLM(processor).generate("hello", BAD, "a")


def test_a_vllm_without_the_methods_is_left_alone_and_the_log_says_what_follows(classes, caplog):
    classes.found["AsyncLLM"] = type("AsyncLLM", (), {})
    front_end.check_requests()
    assert not hasattr(classes.InputProcessor.process_inputs, "__wrapped__")
    assert "This vLLM has no generate" in caplog.text
