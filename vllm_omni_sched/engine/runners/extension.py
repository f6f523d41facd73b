"""Extend a model runner, V1 or V2, by one object, to which the methods of the mixins delegate.

vLLM's workers construct their model runner, and a runner its parts, inline: no factory of all platforms and versions
can be replaced. So the class is exchanged after construction (`mix_in`), which works for every runner. Schedulers need
none of this, because vLLM lets their class be named.
"""

from collections.abc import Iterable
from typing import Any

from vllm_omni_sched import compat
from vllm_omni_sched.config.options import OmniSchedConfig, Toggle
from vllm_omni_sched.engine.runners.mrope import SessionPositions
from vllm_omni_sched.engine.sessions.messages import SessionReceiver
from vllm_omni_sched.items import FeatureWindows


class GatherWindows:
    """Finds the items of a step, where vLLM's own search would be linear or wrong.

    Args:
        config: option ``windows`` switches this off.
        module: the module of vLLM whose search is judged.
    """

    def __init__(self, config: OmniSchedConfig, module: str) -> None:
        self.narrows = config.windows is not Toggle.OFF
        self._native = compat.native_windows(module)
        self._windows = FeatureWindows()

    def shown(self, request_id: str, features: list[Any] | None, start: int, num_tokens: int) -> list[Any] | None:
        """Return the items that overlap these tokens; None if vLLM may search ``features`` itself."""
        if not self.narrows or not features:
            return None
        index = self._windows.index_of(request_id, features)
        if self._native and index.sequential:
            return None
        return [features[i] for i in index.overlapping(start, start + num_tokens)]

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop the indexes of requests that have finished."""
        self._windows.forget(request_ids)


class RunnerExtension:
    """Session messages and the lane of one model runner.

    Attributes:
        config: the options.
        receiver: expands session messages.
        ahead: the worker half of encode-ahead; None until the model is loaded, or without it.
    """

    def __init__(self, config: OmniSchedConfig, *, uses_mrope: bool) -> None:
        strip_one = compat.strip_feature()
        self.config = config
        self.receiver = SessionReceiver(lambda feature: strip_one(feature, uses_mrope))
        self.ahead: Any = None


class RunnerV1Extension(RunnerExtension):
    """Adds windows and positions, which V2 keeps in objects of their own.

    Attributes:
        windows: finds the items of a step.
        positions: M-RoPE positions that are continued; None until the model is loaded, or if they are not.
    """

    def __init__(self, config: OmniSchedConfig, *, uses_mrope: bool) -> None:
        super().__init__(config, uses_mrope=uses_mrope)
        self.windows = GatherWindows(config, compat.RUNNER_V1)
        self.positions: SessionPositions | None = None


def mix_in(instance: Any, mixin: type, config: OmniSchedConfig) -> bool:
    """Make ``instance`` an instance of its class *and* ``mixin``; return False if it is one already.

    The mixin has no ``__init__``; its ``omni_prepare`` is called once on the instance.
    """
    cls = type(instance)
    if issubclass(cls, mixin):
        return False
    instance.__class__ = type(
        f"Omni{cls.__name__}", (mixin, cls), {"__module__": mixin.__module__, "__doc__": mixin.__doc__}
    )
    instance.omni_prepare(config)
    return True
