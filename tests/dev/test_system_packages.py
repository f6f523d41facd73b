"""Debian packages for the tests, unpacked into an environment."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dev.environment import system_packages
from dev.environment.system_packages import MOONCAKE, SystemPackage, SystemPackageError, advice, fetch, missing


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    (tmp_path / "lib" / "python3.11" / "site-packages" / f"{MOONCAKE}.libs").mkdir(parents=True)
    return tmp_path


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> SystemPackage:
    """A package that is missing until its library or its command is in the environment."""
    package = SystemPackage("tool", "a test", lambda env: (env / "bin" / "prometheus").exists())
    monkeypatch.setattr(system_packages, "PACKAGES", (package,))
    return package


def unpacks(files: list[str], monkeypatch: pytest.MonkeyPatch, environment: Path) -> list[list[str]]:
    """Replace the download by archives whose unpacking makes the given files; return the calls."""
    calls: list[list[str]] = []

    def call(command: list[str]) -> None:
        calls.append(command)
        for file in files:
            path = environment / "debian" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")

    monkeypatch.setattr(system_packages, "_call", call)
    monkeypatch.setattr(system_packages, "_download", lambda names, folder: [folder / f"{name}.deb" for name in names])
    monkeypatch.setattr(shutil, "which", lambda name, path=None: f"/usr/bin/{name}")
    return calls


def test_what_is_there_is_not_fetched(environment: Path, tool: SystemPackage, monkeypatch: pytest.MonkeyPatch) -> None:
    (environment / "bin" / "prometheus").write_text("")
    calls = unpacks([], monkeypatch, environment)
    assert fetch(environment) == []
    assert calls == []


def test_libraries_and_commands_are_found_in_the_environment(
    environment: Path, tool: SystemPackage, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = "usr/lib/x86_64-linux-gnu/libibverbs.so.1"
    unpacks([library, "usr/bin/prometheus"], monkeypatch, environment)
    assert fetch(environment) == ["tool"]
    found = environment / "lib" / "python3.11" / "site-packages" / f"{MOONCAKE}.libs" / "libibverbs.so.1"
    assert found.resolve() == environment / "debian" / library
    assert missing(environment) == []


def test_a_package_that_does_not_help_is_an_error(
    environment: Path, tool: SystemPackage, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpacks([], monkeypatch, environment)
    with pytest.raises(SystemPackageError, match="tool did not provide"):
        fetch(environment)


def test_without_apt_the_packages_are_named(
    environment: Path, tool: SystemPackage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    with pytest.raises(SystemPackageError, match="no apt-get on this system to fetch tool"):
        fetch(environment)
    assert advice([tool]) == "install tool (for tests of a test)"


def test_a_failing_command_gives_its_last_line() -> None:
    with pytest.raises(SystemPackageError, match="sh failed: no such package"):
        system_packages._call(["sh", "-c", "echo first >&2; echo no such package >&2; exit 100"])
