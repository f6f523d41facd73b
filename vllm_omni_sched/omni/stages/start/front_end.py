"""Refuse invalid requests of a pipeline with HTTP 400 where they arrive, before a stage gets them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from vllm_omni_sched.config.stage_options.graph import PriorityOptions
from vllm_omni_sched.engine.front_end import PROMISES, check_extra, check_params, check_responses
from vllm_omni_sched.graph.promises import KNOWN, Promises
from vllm_omni_sched.imports import when_imported, wrap_once
from vllm_omni_sched.omni.stages.requests import Classes

_CHAT = "vllm_omni.entrypoints.openai.serving_chat"
_client_xargs: ContextVar[Mapping[str, Any]] = ContextVar("omni_sched_client_xargs")
"""Our keys in ``vllm_xargs`` of the chat request that this task serves."""


def check_requests(engine: Any, options: PriorityOptions) -> None:
    """Check this engine's requests; `AsyncOmni.generate` is wrapped once for all engines of the process.

    It is wrapped rather than called later, since a streamed answer has begun, with HTTP 200, before vLLM-Omni
    looks at the request. A process without `AsyncOmni` serves no HTTP.
    """
    setattr(engine, PROMISES, promises_of(options))
    check_responses()
    when_imported(_CHAT, _check_chats)
    module = sys.modules.get("vllm_omni.entrypoints.async_omni")
    if (owner := getattr(module, "AsyncOmni", None)) is not None:
        wrap_once(owner, "generate", _checks)


def promises_of(options: PriorityOptions) -> Promises:
    """Return the reader of client promises for a pipeline; clients cannot set targets of its classes."""
    named = options.clients_may_name
    return Promises(Classes(options).by_name, named, {}, option="graph.priority.client_classes", shared=True)


def _check_chats() -> None:
    """Read ``vllm_xargs`` of chat requests."""
    wrap_once(sys.modules[_CHAT].OmniOpenAIServingChat, "create_chat_completion", _reads_xargs)


def _reads_xargs(create_chat_completion: Callable[..., Any]) -> Callable[..., Any]:
    """Accept our keys in ``vllm_xargs`` of a chat request, as vLLM does: vLLM-Omni 0.30 drops them.

    They are added to the parameters of the first stage. Keys in the ``extra_args`` of an explicit
    ``sampling_params_list`` take precedence.
    """

    async def wrapper(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        promises = getattr(getattr(self.engine_client, "engine", None), PROMISES, None)
        if promises is None:
            return await create_chat_completion(self, request, *args, **kwargs)
        xargs = getattr(request, "vllm_xargs", None) or {}
        try:
            check_extra(promises, xargs)
        except ValueError as error:  # an exception that leaves this method is answered with HTTP 500
            return self.create_error_response(error)
        before = _client_xargs.set({key: xargs[key] for key in KNOWN if key in xargs})
        try:
            return await create_chat_completion(self, request, *args, **kwargs)
        finally:
            _client_xargs.reset(before)

    return wrapper


def _checks(generate: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        promises: Promises | None = getattr(self.engine, PROMISES, None)
        if promises is not None:
            params, given = _first_params(args, kwargs), _client_xargs.get({})
            check_params(promises, params)
            if given and params is not None:
                params.extra_args = {**given, **(params.extra_args or {})}
        return generate(self, *args, **kwargs)

    return wrapper


def _first_params(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the parameters of the first stage, which hold our keys."""
    of_stages = kwargs.get("sampling_params_list")
    if of_stages is None:
        return kwargs["sampling_params"] if "sampling_params" in kwargs else args[1] if len(args) > 1 else None
    if isinstance(of_stages, Sequence) and not isinstance(of_stages, str | bytes):
        return of_stages[0] if of_stages else None
    return of_stages
