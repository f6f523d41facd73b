"""The same on versions that are not installed: their Python sources, in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from patches.sources import SourceError, fetch_source

ROOT = Path(__file__).resolve().parents[2]
VENV_OF = {"0.22.1": ".venv", "0.31.0": ".venv", "0.32.0": ".venv-latest"}
"""Which of our two environments is nearer to a version's dependencies; both are in one `make test`."""

OFTEN, LONG = range(20), range(20, 100)


def versions_of_this_environment() -> list[str]:
    here = Path(sys.prefix).name
    mine = [version for version, venv in VENV_OF.items() if venv == here]
    return mine or list(VENV_OF)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [OFTEN, pytest.param(LONG, marks=pytest.mark.long)], ids=["often", "long"])
@pytest.mark.parametrize("version", versions_of_this_environment())
def test_random_workloads(version: str, seeds: range, tmp_path: Path) -> None:
    try:
        source = fetch_source(version)
    except SourceError as error:
        pytest.skip(str(error))
    # Not the whole tree: it has a package `tests` as well.
    (tmp_path / "vllm").symlink_to(source / "vllm", target_is_directory=True)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "VLLM_PLUGINS": "",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.differential",
        f"{seeds.start}:{seeds.stop}",
        "--tree",
        "--json",
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["version"].startswith(version) or report["tree"] == str(tmp_path / "vllm")
    assert all(report[name] for name in ("preemptions", "deltas", "evictions", "spilled"))
