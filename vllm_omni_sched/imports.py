"""Hooks into modules of others: something to do once one is imported, and functions that are wrapped once."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from vllm_omni_sched.logs import get_logger

logger = get_logger(__name__)

_MARK = "__omni_sched__"


def when_imported(module: str, then: Callable[[], object]) -> None:
    """Call ``then`` once ``module`` is there: now, if it is, or right after its first import. Twice is fine.

    What cannot be found or has another shape than expected is logged, and the import goes on.
    """
    found = sys.modules.get(module)
    if found is not None and not getattr(found.__spec__, "_initializing", False):
        _call(module, then)
        return
    waiting = _watcher.waiting.setdefault(module, [])
    if then not in waiting:
        waiting.append(then)
    if _watcher not in sys.meta_path:
        sys.meta_path.insert(0, _watcher)


def _call(module: str, then: Callable[[], object]) -> None:
    try:
        then()
    except (ImportError, AttributeError) as error:
        logger.warning("vllm-omni-sched cannot hook into this %s, and leaves it unchanged: %s", module, error)


class _Watcher(MetaPathFinder):
    """Finds nothing itself: what others find of the modules that are waited for is watched while it is executed."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Callable[[], object]]] = {}

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self.waiting:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find is not None else None
            if spec is not None:
                if spec.loader is not None:
                    self._watch(name, spec.loader)
                return spec  # type: ignore[no-any-return]
        return None

    def _watch(self, name: str, loader: Any) -> None:
        execute = loader.exec_module

        @functools.wraps(execute)
        def exec_module(module: ModuleType) -> None:
            execute(module)
            for then in self.waiting.pop(name, ()):
                _call(name, then)

        loader.exec_module = exec_module


_watcher = _Watcher()


def wrap_once(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a method of a class, or a function of a module, by a wrapper, unless it is wrapped by us already."""
    method = getattr(owner, name)
    if not hasattr(method, _MARK):
        wrapper = functools.wraps(method)(wrap(method))
        setattr(wrapper, _MARK, True)
        setattr(owner, name, wrapper)
