"""What is done once a module is imported, whichever comes first."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_omni_sched import connector_names, imports
from vllm_omni_sched.imports import when_imported


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "awaited_package").mkdir()
    (tmp_path / "awaited_package" / "__init__.py").write_text("")
    (tmp_path / "awaited_package" / "inner.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield "awaited_package.inner"
    for name in ("awaited_package.inner", "awaited_package"):
        sys.modules.pop(name, None)


def test_it_is_called_once_right_after_the_import(module: str) -> None:
    seen: list[int] = []

    def then() -> None:
        seen.append(sys.modules[module].VALUE)

    when_imported(module, then)
    when_imported(module, then)
    assert module not in sys.modules
    assert not seen
    found = importlib.import_module(module)
    assert seen == [1]
    assert found.__spec__ is not None
    assert type(found.__loader__).__name__ == "SourceFileLoader"
    assert imports._watcher.waiting.get(module) is None


def test_what_is_there_already_is_not_waited_for(module: str) -> None:
    importlib.import_module(module)
    seen: list[str] = []
    when_imported(module, lambda: seen.append("now"))
    assert seen == ["now"]


def test_a_module_that_is_not_what_was_expected_does_not_break_its_import(
    module: str, caplog: pytest.LogCaptureFixture
) -> None:
    when_imported(module, lambda: sys.modules[module].NOTHING)
    assert importlib.import_module(module).VALUE == 1
    assert f"cannot hook into this {module}" in caplog.text


def test_a_module_that_is_not_there_stays_an_import_error() -> None:
    when_imported("awaited_package.nowhere", lambda: pytest.fail("there is no such module"))
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("awaited_package.nowhere")
    del imports._watcher.waiting["awaited_package.nowhere"]


class Factory:
    """Stands in for vLLM-Omni's factory."""

    def __init__(self, *known: str) -> None:
        self.known = dict.fromkeys(known)

    def list_registered_connectors(self) -> list[str]:
        return list(self.known)

    def register_connector(self, name: str, make: object) -> None:
        assert name not in self.known
        self.known[name] = None


def test_names_are_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = type(sys)(connector_names.FACTORY)
    factory = Factory("SharedMemoryConnector", "ArenaConnector")
    theirs.OmniConnectorFactory = factory  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, connector_names.FACTORY, theirs)
    monkeypatch.delenv(connector_names.ARENA_VARIABLE, raising=False)
    for _ in range(2):
        connector_names.register_names()
    assert set(factory.known) == {"SharedMemoryConnector", *connector_names.CONNECTORS}
    monkeypatch.delenv(connector_names.ARENA_VARIABLE)
