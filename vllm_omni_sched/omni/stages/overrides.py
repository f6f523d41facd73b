"""Whether vLLM-Omni still has the methods that our classes add decisions to."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from types import FunctionType

from vllm_omni_sched.errors import MissingSymbolError


def extended(ours: type) -> list[str]:
    """The methods of a class that do what those of their name in its base do, and more: they call super() for it.

    Read from their code, so that no list of them can be out of date.
    """
    return [
        name
        for name, method in vars(ours).items()
        if isinstance(method, FunctionType) and {"super", name} <= set(method.__code__.co_names)
    ]


def refuse_lost(ours: type) -> None:
    """A method that is no more in the base, perhaps under a new name, would never be called, and its decisions lost.

    Raises:
        MissingSymbolError: there is one; the message names it, and the version of vLLM-Omni.
    """
    base = ours.__mro__[1]
    lost = [name for name in extended(ours) if not callable(getattr(base, name, None))]
    if lost:
        listed = ", ".join(f"{base.__name__}.{name}" for name in lost)
        raise MissingSymbolError(
            f"the stage scheduler adds to {listed}, which vLLM-Omni {_version()} does not have: take a supported "
            "version, or turn the stage scheduler off (omni_sched: false)"
        )


def _version() -> str:
    try:
        return version("vllm-omni")
    except PackageNotFoundError:
        return "of unknown version"
