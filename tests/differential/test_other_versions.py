"""The same on versions that are not installed: their Python sources, in processes of their own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from patches.sources import SourceError, fetch_source
from tests.engine.harness.processes import ENVIRONMENT
from tests.support.tree_programs import Ended, run_on_tree

VENV_OF = {"0.22.1": ".venv", "0.31.0": ".venv", "0.32.0": ".venv-latest"}
"""Which of our two environments is nearer to a version's dependencies; both are in one `make test`."""

OFTEN, LONG = range(20), range(20, 100)
VIDEOS = ["-m", "tests.engine.harness.video_tree"]

pytestmark = pytest.mark.slow


def versions_of_this_environment() -> list[str]:
    here = Path(sys.prefix).name
    mine = [version for version, venv in VENV_OF.items() if venv == here]
    return mine or list(VENV_OF)


def workloads(seeds: range) -> list[str]:
    return ["-m", "tests.differential", f"{seeds.start}:{seeds.stop}", "--json"]


def ended(version: str, folder: Path, *programs: list[str]) -> list[Ended]:
    try:
        source = fetch_source(version)
    except SourceError as error:
        pytest.skip(str(error))
    return run_on_tree(source, programs, folder, environment=ENVIRONMENT)


def report_of(program: Ended) -> dict[str, Any]:
    assert program.exit_code == 0, program.output[-8000:]
    report: dict[str, Any] = json.loads(program.output.splitlines()[-1])
    return report


@pytest.fixture(scope="module", params=versions_of_this_environment())
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def programs(version: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Ended]]:
    """Return the folder in front of which vLLM came from, and what was run there."""
    folder = tmp_path_factory.mktemp("tree")
    return folder, ended(version, folder, workloads(OFTEN), VIDEOS)


def check_workloads(program: Ended, version: str, folder: Path) -> None:
    report = report_of(program)
    assert report["version"].startswith(version) or report["tree"] == str(folder / "vllm")
    assert all(report[name] for name in ("preemptions", "deltas", "evictions", "spilled"))


def test_random_workloads(version: str, programs: tuple[Path, list[Ended]]) -> None:
    folder, (program, _) = programs
    check_workloads(program, version, folder)


@pytest.mark.long
def test_more_random_workloads(version: str, tmp_path: Path) -> None:
    (program,) = ended(version, tmp_path, workloads(LONG))
    check_workloads(program, version, tmp_path)


def test_frames_and_metadata_of_videos_are_those_of_its_loaders(programs: tuple[Path, list[Ended]]) -> None:
    folder, (_, program) = programs
    report = report_of(program)
    assert report["vllm"] == str(folder / "vllm" / "__init__.py")
    assert len(report["same"]) >= 5 * 12
    assert [case for case, same in report["same"].items() if not same] == []
