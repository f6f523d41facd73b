"""Our classes in the shape in which vLLM's own tests build and call vLLM's.

Nothing of ours is changed here: a scheduler is told which kind the test means, and its messages to workers are read the
way a worker reads them; a runner test that calls a method on a stub gets our method on that stub.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


def following_its_class(cls: type, *, async_scheduling: bool) -> type:
    """`cls`, with the config made to agree while it is built. Tests say which kind they mean by the class they name."""

    class Following(cls):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            vllm_config = kwargs.get("vllm_config", args[0] if args else None)
            scheduler_config = vllm_config.scheduler_config
            asked = scheduler_config.async_scheduling
            scheduler_config.async_scheduling = async_scheduling
            try:
                super().__init__(*args, **kwargs)
            finally:
                scheduler_config.async_scheduling = asked

    return _named_like(cls, Following)


def as_workers_see_it(cls: type) -> type:
    """`cls`, whose step output has gone through the worker side of the session protocol.

    vLLM's tests of streaming sessions read what a worker is sent. Ours is sent deltas; a worker holds the session again
    after `SessionReceiver.expand`, so that is where the same assertions apply, and where they judge both halves.
    """
    from vllm_omni_sched import compat
    from vllm_omni_sched.engine.sessions.messages import SessionDelta, SessionReceiver

    class Seen(cls):  # type: ignore[misc, valid-type]
        num_deltas = 0
        # For tests that make a scheduler without its constructor: what ours would have set and a step reads.
        omni = _bare_extension()

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            output = super().schedule(*args, **kwargs)
            if not hasattr(self, "_omni_worker"):
                strip_one = compat.strip_feature()
                uses_mrope = bool(self.vllm_config.model_config.uses_mrope)
                self._omni_worker = SessionReceiver(lambda feature: strip_one(feature, uses_mrope))
            Seen.num_deltas += sum(isinstance(new, SessionDelta) for new in output.scheduled_new_reqs)
            self._omni_worker.expand(output)
            for new in output.scheduled_new_reqs:
                new.prompt_token_ids = _as_list(new.prompt_token_ids)
                new.prefill_token_ids = _as_list(new.prefill_token_ids)
            return output

    return _named_like(cls, Seen)


def _bare_extension() -> Any:
    from vllm.v1.request import RequestStatus

    from vllm_omni_sched.engine.encoder.inputs import EncoderInputs
    from vllm_omni_sched.engine.extension import SchedulerExtension
    from vllm_omni_sched.engine.order import index_items, sort_update
    from vllm_omni_sched.engine.refusals import Refusals
    from vllm_omni_sched.engine.sessions.registry import Sessions
    from vllm_omni_sched.monitor.counts import SchedulerMetrics

    metrics, refusals = SchedulerMetrics(), Refusals()
    inputs = EncoderInputs(
        narrows=False,
        native_windows=True,
        running=RequestStatus.RUNNING,
        index=index_items,
        metrics=metrics,
    )
    return SchedulerExtension(metrics, inputs, Sessions(refusals), refusals, sort_update)


def _as_list(tokens: Any) -> Any:
    """A worker's copy of a session's tokens is an array, and an array never equals a list."""
    return tokens.tolist() if isinstance(tokens, array) else tokens


def runner_with(base: type, mixin: type, methods: tuple[str, ...]) -> type:
    """`base` with our runner mixin; each of `methods` may also be called on a stub that is no runner at all."""
    from vllm_omni_sched.config.options import OmniSchedConfig

    class Promoted(mixin, base):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.omni_prepare(OmniSchedConfig())

    class OnStub(Promoted):
        """Our methods and state; every other attribute is the stub's."""

        def __init__(self, stub: Any) -> None:
            object.__setattr__(self, "_omni_stub", stub)
            if not hasattr(stub, "vllm_config"):
                stub.vllm_config = _TEXT_ONLY
            self.omni_prepare(OmniSchedConfig())

        def __getattribute__(self, name: str) -> Any:
            if name.startswith(("_omni", "omni", "__")):
                return object.__getattribute__(self, name)
            return getattr(object.__getattribute__(self, "_omni_stub"), name)

        def __setattr__(self, name: str, value: Any) -> None:
            object.__setattr__(self if name.startswith(("_omni", "omni")) else self._omni_stub, name, value)

    wrapped: dict[int, OnStub] = {}

    def on_stub(stub: Any) -> OnStub:
        # By identity, and keeping the stub: state must outlive a call, and a SimpleNamespace has no hash.
        if id(stub) not in wrapped:
            wrapped[id(stub)] = OnStub(stub)
        return wrapped[id(stub)]

    for name in methods:
        setattr(Promoted, name, _also_on_a_stub(getattr(mixin, name), Promoted, on_stub))
    return _named_like(base, Promoted)


_TEXT_ONLY = SimpleNamespace(model_config=SimpleNamespace(uses_mrope=False))


def _also_on_a_stub(method: Callable[..., Any], cls: type, on_stub: Callable[[Any], Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Not isinstance: a Mock with a spec claims to be an instance.
        return method(self if issubclass(type(self), cls) else on_stub(self), *args, **kwargs)

    return call


def _named_like(cls: type, derived: type) -> type:
    derived.__name__, derived.__qualname__, derived.__module__ = cls.__name__, cls.__qualname__, cls.__module__
    return derived
