"""Run on the Python sources of a vLLM that is not installed: no compiled operators, another version's dependencies."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence

# Asked for at import by old versions (up to 0.27), needed by no scheduler.
OPTIONAL_PACKAGES = ("gguf",)


def enter_tree() -> None:
    """Call before the first import of vLLM, in a process whose PYTHONPATH begins with the tree.

    Such a tree has no distribution whose version says `cpu`, so vLLM would find no platform; without one some config
    classes refuse to be built.
    """
    missing = [name for name in OPTIONAL_PACKAGES if importlib.util.find_spec(name) is None]
    sys.meta_path.append(_HollowFinder(missing))
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms.current_platform = CpuPlatform()


class _HollowFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages `names` and anything below them; a name imported from one is an empty class."""

    def __init__(self, names: Sequence[str]):
        self.names = tuple(names)

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self.names:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _HollowModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []


class _HollowModule(types.ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})
