"""Requests of a pipeline that make no sense are refused where they come in, as HTTP 400, before a stage sees them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from vllm_omni_sched.engine.front_end import PROMISES, check_params, check_responses, wrap_once
from vllm_omni_sched.graph.promises import Promises
from vllm_omni_sched.omni.stages.requests import Classes
from vllm_omni_sched.stage_options.graph import PriorityOptions


def check_requests(engine: Any, options: PriorityOptions) -> None:
    """Let this engine's requests be checked; `AsyncOmni.generate` is wrapped once for all engines of the process.

    It is wrapped rather than called later, since an answer that is streamed has begun, with HTTP 200, before vLLM-Omni
    looks at the request. A process without `AsyncOmni` serves no HTTP.
    """
    setattr(engine, PROMISES, promises_of(options))
    check_responses()
    module = sys.modules.get("vllm_omni.entrypoints.async_omni")
    if (owner := getattr(module, "AsyncOmni", None)) is not None:
        wrap_once(owner, "generate", _checks)


def promises_of(options: PriorityOptions) -> Promises:
    """Return what requests of a pipeline may say about themselves; its classes have no targets that they may set."""
    named = options.client_classes
    if named is None:
        first = options.classes[options.default_class].rank
        named = [name for name, each in options.classes.items() if each.rank >= first]
    return Promises(Classes(options).by_name, named, {}, option="graph.priority.client_classes", shared=True)


def _checks(generate: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        promises: Promises | None = getattr(self.engine, PROMISES, None)
        if promises is not None:
            check_params(promises, _first_params(args, kwargs))
        return generate(self, *args, **kwargs)

    return wrapper


def _first_params(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Those of the first stage, where a request says who it is."""
    of_stages = kwargs.get("sampling_params_list")
    if of_stages is None:
        return kwargs["sampling_params"] if "sampling_params" in kwargs else args[1] if len(args) > 1 else None
    if isinstance(of_stages, Sequence) and not isinstance(of_stages, str | bytes):
        return of_stages[0] if of_stages else None
    return of_stages
