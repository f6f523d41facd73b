"""Refusal of malformed requests in the front end, with HTTP 400, before the engine sees them.

vLLM's front end reads ``vllm_xargs`` into `SamplingParams.extra_args` without checking them. These methods are wrapped,
only in a process that creates the configuration of an engine with our scheduler:

1. `InputProcessor.process_inputs`, through which every request goes.
2. `AsyncLLM.generate`, because a streamed answer has begun, with HTTP 200, before `process_inputs` is called.
3. `OpenAIServingResponses.create_responses`, because its answer has begun before `generate` is called.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm.logger import init_logger

from vllm_omni_sched import compat
from vllm_omni_sched.config.errors import RequestError
from vllm_omni_sched.engine.fitted import engine_options
from vllm_omni_sched.engine.named import uses_our_scheduler
from vllm_omni_sched.graph.promises import Promises, promises_of
from vllm_omni_sched.imports import when_imported, wrap_once
from vllm_omni_sched.logs import logger_name

logger = init_logger(logger_name(__name__))

PROMISES = "omni_promises"
"""Name of the attribute that holds the promises: on vLLM's input processor, and on vLLM-Omni's engine."""


def check_requests() -> None:
    """Make the engines of this process refuse malformed requests; idempotent."""
    check_responses()
    processor = compat.find(compat.INPUT_PROCESSOR, "InputProcessor")
    async_llm = compat.find(compat.ASYNC_LLM, "AsyncLLM")
    hooks = [
        (processor, "__init__", _reads_options),
        (processor, "process_inputs", _checks),
        (async_llm, "generate", _checks_early),
    ]
    missing = [name for owner, name, _ in hooks if owner is None or not hasattr(owner, name)]
    if missing:
        logger.warning(
            "This vLLM has no %s: a request with a malformed omni_class or target fails in the engine, with "
            "HTTP 500, and clients may name any class.",
            ", ".join(missing),
        )
        return
    for owner, name, wrap in hooks:
        wrap_once(owner, name, wrap)


def check_responses() -> None:
    """Make servers of this process refuse malformed requests to ``/v1/responses``, once that module is imported;
    idempotent.
    """
    when_imported(compat.RESPONSES, _check_responses)


def _check_responses() -> None:
    serving = compat.find(compat.RESPONSES, "OpenAIServingResponses")
    if hasattr(serving, "create_responses"):
        wrap_once(serving, "create_responses", _checks_responses)


def _reads_options(init: Callable[..., None]) -> Callable[..., None]:
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        config = self.vllm_config
        if uses_our_scheduler(config):
            setattr(self, PROMISES, promises_of(engine_options(config)))

    return wrapper


def _checks(process_inputs: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        _check(self, kwargs["params"] if "params" in kwargs else args[2])
        return process_inputs(self, *args, **kwargs)

    return wrapper


def _checks_early(generate: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        _check(self.input_processor, kwargs["sampling_params"] if "sampling_params" in kwargs else args[1])
        return generate(self, *args, **kwargs)

    return wrapper


def _checks_responses(create_responses: Callable[..., Any]) -> Callable[..., Any]:
    async def wrapper(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        client = self.engine_client
        for owner in (getattr(client, "input_processor", None), getattr(client, "engine", None)):  # vLLM's, vLLM-Omni's
            if (promises := getattr(owner, PROMISES, None)) is not None:
                check_extra(promises, request.vllm_xargs)
        return await create_responses(self, request, *args, **kwargs)

    return wrapper


def _check(processor: Any, params: Any) -> None:
    promises: Promises | None = getattr(processor, PROMISES, None)
    if promises is not None:
        check_params(promises, params)


def check_params(promises: Promises, params: Any) -> None:
    """Refuse sampling parameters whose ``extra_args`` a client may not send; raises the errors of `check_extra`."""
    check_extra(promises, getattr(params, "extra_args", None))


def check_extra(promises: Promises, extra: Any) -> None:
    """Refuse extra arguments that a client may not send.

    Raises:
        RequestError: an argument is malformed; also a `VLLMValidationError`, so that servers answer with HTTP 400.
    """
    try:
        promises.check(extra)
    except RequestError as error:
        raise _refused()(str(error)) from None


@functools.cache
def _refused() -> type[RequestError]:
    validation = compat.find("vllm.exceptions", "VLLMValidationError")
    return RequestError if validation is None else type("RequestError", (validation, RequestError), {})
