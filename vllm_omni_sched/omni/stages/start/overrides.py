"""Check that vLLM-Omni still has the methods that our classes extend."""

from __future__ import annotations

from types import FunctionType

from vllm_omni_sched.config.errors import MissingSymbolError
from vllm_omni_sched.config.extras import version_of


def overridden_methods(ours: type) -> list[str]:
    """Return the methods of a class that extend the method of the same name in the base: those that call super().

    They are read from the code, so that no list of them can be out of date.
    """
    return [
        name
        for name, method in vars(ours).items()
        if isinstance(method, FunctionType) and {"super", name} <= set(method.__code__.co_names)
    ]


def check_overrides(ours: type) -> None:
    """Refuse a version whose base lacks a method that we extend: ours would never be called, and its decisions lost.

    Raises:
        MissingSymbolError: a method is missing; the message names it, and the version of vLLM-Omni.
    """
    base = ours.__mro__[1]
    extended = [*overridden_methods(ours), *getattr(ours, "REPLACES", ())]
    lost = [name for name in extended if not callable(getattr(base, name, None))]
    if lost:
        found = version_of("vllm-omni") or "of unknown version"
        listed = ", ".join(f"{base.__name__}.{name}" for name in lost)
        raise MissingSymbolError(
            f"the stage scheduler extends {listed}, which vLLM-Omni {found} does not have: install a supported "
            "version, or turn the stage scheduler off (omni_sched: false)"
        )
