"""Is anything of ours left in vLLM?

`python -m tests.engine.harness.absence`: import vLLM, register the plugin twice, print as JSON what that changed.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator
from importlib import import_module
from typing import Any

OURS = "vllm_omni_sched"


def symbols(package: str = "vllm") -> Iterator[tuple[str, Any]]:
    """Return every attribute of every loaded module of the package, and of every class that is defined in one."""
    for name, module in sorted(sys.modules.items()):
        if name.split(".")[0] != package or not isinstance(module, types.ModuleType):
            continue
        for attribute, value in list(vars(module).items()):
            yield f"{name}.{attribute}", value
            if isinstance(value, type) and value.__module__ == name:
                for member, inner in list(vars(value).items()):
                    yield f"{name}.{attribute}.{member}", inner


def traces_of_ours() -> list[str]:
    """Names in vLLM behind which there is a function or a class of ours, however disguised."""
    return [name for name, value in symbols() if _is_ours(value)]


def _is_ours(value: Any) -> bool:
    if isinstance(value, classmethod | staticmethod):
        value = value.__func__
    if isinstance(value, types.FunctionType):
        return str(value.__globals__.get("__name__")).split(".")[0] == OURS  # functools.wraps lies about __module__
    return isinstance(value, type) and value.__module__.split(".")[0] == OURS


def changes_by_register() -> dict[str, Any]:
    """Which names are bound to other objects after `register()`; whether the wrappers still know the original."""
    from vllm_omni_sched import compat, plugin

    for module in sorted({probe.symbol.rsplit(".", 1)[0] for probe in compat.probe_all()}):
        _import_module_of(module)
    loaders = import_module("vllm.multimodal.video").VIDEO_LOADER_REGISTRY.name2class
    named = set(loaders)
    before = dict(symbols())
    plugin.register()
    once = dict(symbols())
    plugin.register()
    twice = dict(symbols())
    changed = sorted(name for name, value in before.items() if once.get(name) is not value)
    return {
        "symbols": len(before),
        "changed": changed,
        "wrapping_the_original": [name for name in changed if getattr(once[name], "__wrapped__", None) is before[name]],
        "changed_by_the_second": sorted(name for name, value in once.items() if twice.get(name) is not value),
        "loaders_added": sorted(loaders.keys() - named),
        "modules": sorted({name.rsplit(".", 1)[0] for name in before}),
    }


def _import_module_of(path: str) -> None:
    """Import the module in which `path`, a class or a module, lives."""
    try:
        import_module(path)
    except ImportError:
        if "." in path:
            _import_module_of(path.rsplit(".", 1)[0])


if __name__ == "__main__":
    json.dump(changes_by_register(), sys.stdout)
