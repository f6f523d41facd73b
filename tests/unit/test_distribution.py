"""What the archives of a release hold: the wheel the package, the source distribution all that builds and checks it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

sdist = pytest.importorskip("hatchling.builders.sdist", reason="hatchling builds the archives")
wheel = pytest.importorskip("hatchling.builders.wheel", reason="hatchling builds the archives")

ROOT = Path(__file__).resolve().parents[2]
OF_THE_REPOSITORY = (".ci/", ".gitignore")  # not of the project


def files(builder) -> set[str]:
    return {file.distribution_path for file in builder(str(ROOT)).recurse_included_files()}


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("this is no checkout")
    return [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


def test_the_source_distribution_holds_the_project():
    held = files(sdist.SdistBuilder) | {"pyproject.toml"}  # which the builder adds by itself
    assert [name for name in tracked() if name not in held and not name.startswith(OF_THE_REPOSITORY)] == []


def test_the_wheel_holds_the_package_and_nothing_else():
    held = files(wheel.WheelBuilder)
    assert {name.split("/")[0] for name in held} == {"vllm_omni_sched"}
    assert [name for name in tracked() if name.startswith("vllm_omni_sched/") and name not in held] == []
