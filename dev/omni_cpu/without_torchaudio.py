"""Let the HTTP server of vLLM-Omni be imported where torchaudio has no build: it wants it only for some sound."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

NAMES = ("torchaudio", "torchaudio.functional", "torchaudio.transforms", "torchaudio.compliance.kaldi")


class _StandIn(ModuleType):
    """Has every name that is asked for; none of them can be called."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None, is_package=True)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_: Any, **__: Any) -> Any:
            raise NotImplementedError(f"{self.__name__}.{name}: torchaudio is not installed")

        return missing


def stand_in_for_torchaudio() -> None:
    """Replace torchaudio before the server is imported, unless it is installed. Calling twice is fine."""
    if "torchaudio" in sys.modules or find_spec("torchaudio") is not None:
        return
    for name in NAMES:
        sys.modules[name] = _StandIn(name)
