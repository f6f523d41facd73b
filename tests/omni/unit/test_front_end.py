"""What a pipeline's front end refuses, before a stage sees the request."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from vllm.exceptions import VLLMValidationError
from vllm_omni.entrypoints.async_omni import AsyncOmni

from tests.support.omni_stages import params
from vllm_omni_sched.config.errors import RequestError
from vllm_omni_sched.config.stage_options.graph import ClassTargets, PriorityOptions
from vllm_omni_sched.omni.stages.start import front_end
from vllm_omni_sched.omni.stages.start.front_end import check_requests, promises_of

pytestmark = pytest.mark.omni

GOLD = {"gold": ClassTargets(rank=0), "usual": ClassTargets(rank=1), "spare": ClassTargets(rank=2)}


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Ask a pipeline; whether `generate` of vLLM-Omni itself was called is told by its request id."""
    called: list[str] = []

    async def generate(self: Any, prompt: Any, sampling_params: Any = None, request_id: str = "", **_: Any) -> Any:
        yield called.append(request_id)

    monkeypatch.setattr(AsyncOmni, "generate", generate)

    def asked(options: PriorityOptions | None, *args: Any, **kwargs: Any) -> Any:
        omni = SimpleNamespace(engine=SimpleNamespace())
        if options is not None:
            check_requests(omni.engine, options)
        return AsyncOmni.generate(omni, "hello", *args, **kwargs)

    yield asked
    assert called == []  # nobody has asked for an output yet


@pytest.mark.parametrize("how", ["sampling_params", "sampling_params_list", "positional", "one for all"])
def test_what_makes_no_sense_is_refused_before_an_answer_begins(ask, how):
    bad = params(extra_args={"omni_class": "vip"})
    given = {
        "sampling_params": ((), {"sampling_params": bad}),
        "sampling_params_list": ((), {"sampling_params_list": [bad, params()]}),
        "positional": ((bad, "a"), {}),
        "one for all": ((), {"sampling_params_list": bad}),
    }
    args, kwargs = given[how]
    with pytest.raises(
        RequestError, match=r"'vip', which is not an SLA class: it must be one of interactive, batch"
    ) as refused:
        ask(PriorityOptions(), *args, **kwargs)
    assert isinstance(refused.value, VLLMValidationError)


@pytest.mark.parametrize(
    "extra",
    [None, {"omni_class": "batch"}, {"omni_user": 7}, {"omni_task": ["chat"], "sample_solver": "x"}, {"steps": {}}],
)
def test_what_makes_sense_and_what_is_others_goes_through(ask, extra):
    ask(PriorityOptions(), sampling_params_list=[params(extra_args=extra), params(extra_args={"omni_class": "vip"})])
    ask(PriorityOptions())


def test_a_pipeline_without_options_is_as_it_was(ask):
    ask(PriorityOptions(), params())  # another pipeline of this process has some
    ask(None, params(extra_args={"omni_class": "vip"}))


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        (PriorityOptions(), {"interactive", "batch"}),
        (PriorityOptions(client_classes=["realtime"]), {"realtime"}),
        (PriorityOptions(default_class="realtime"), {"realtime", "interactive", "batch"}),
        (PriorityOptions(classes=GOLD, default_class="usual"), {"usual", "spare"}),
        (PriorityOptions(classes=GOLD, default_class="usual", client_classes=[]), set()),
    ],
)
def test_clients_may_name_what_the_operator_allows(options, allowed):
    promises = promises_of(options)
    for name in options.classes:
        if name in allowed:
            promises.check({"omni_class": name})
        else:
            with pytest.raises(RequestError, match=r"may not ask for \(option 'graph\.priority\.client_classes'\)"):
                promises.check({"omni_class": name})


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ask for a chat completion, of which vLLM-Omni itself only calls `generate`; returns what the first stage gets."""

    async def generate(self: Any, prompt: Any, sampling_params_list: Any) -> Any:
        yield

    class OmniOpenAIServingChat:
        """As much of vLLM-Omni's as counts; the server itself is asked in `tests/omni/test_stages.py`."""

        def __init__(self) -> None:
            self.engine_client = SimpleNamespace(engine=SimpleNamespace())

        def create_error_response(self, error: Exception) -> str:
            return str(error)

        async def create_chat_completion(self, request: Any, raw_request: Any = None) -> Any:
            listed = [params(extra_args=extra) for extra in request.extra_args]
            AsyncOmni.generate(self.engine_client, "hello", sampling_params_list=listed)
            return [one.extra_args for one in listed]

    monkeypatch.setattr(AsyncOmni, "generate", generate)
    module = ModuleType(front_end._CHAT)
    module.OmniOpenAIServingChat = OmniOpenAIServingChat  # type: ignore[attr-defined]
    module.__spec__ = ModuleSpec(front_end._CHAT, None)
    monkeypatch.setitem(sys.modules, front_end._CHAT, module)

    async def asked(xargs: Any, *extra_args: Any, scheduled: bool = True) -> Any:
        serving = OmniOpenAIServingChat()
        check_requests(SimpleNamespace(), PriorityOptions())  # of another pipeline of this process
        if scheduled:
            check_requests(serving.engine_client.engine, PriorityOptions())
        request = SimpleNamespace(vllm_xargs=xargs, extra_args=extra_args)
        return await serving.create_chat_completion(request)

    return asked


@pytest.mark.asyncio
async def test_what_a_chat_request_says_of_itself_goes_to_the_first_stage(chat):
    said = {"omni_class": "batch", "omni_user": "anna"}
    assert await chat(said, None, None) == [said, None]
    assert await chat(said | {"somebody_elses": 1}, {"omni_user": "bert"}) == [said | {"omni_user": "bert"}]
    assert await chat(None, {"steps": 3}) == [{"steps": 3}]  # and nothing of the request before
    assert await chat(said, None, scheduled=False) == [None]  # as vLLM-Omni has it


@pytest.mark.asyncio
async def test_a_chat_request_that_makes_no_sense_is_answered_with_an_error(chat):
    said = "omni_class is 'vip', which is not an SLA class: it must be one of interactive, batch"
    assert await chat({"omni_class": "vip"}, None) == said
    with pytest.raises(RequestError, match="'vip', which is not an SLA class"):
        await chat({}, {"omni_class": "vip"})
