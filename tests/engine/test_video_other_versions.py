"""Our video loader on versions that are not installed: their Python sources, in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from patches.sources import SourceError, fetch_source
from tests.differential.test_other_versions import versions_of_this_environment
from tests.engine.harness.processes import ENVIRONMENT, ROOT


@pytest.mark.slow
@pytest.mark.parametrize("version", versions_of_this_environment())
def test_frames_and_metadata_are_those_of_its_loaders(version: str, tmp_path: Path) -> None:
    try:
        source = fetch_source(version)
    except SourceError as error:
        pytest.skip(str(error))
    (tmp_path / "vllm").symlink_to(source / "vllm", target_is_directory=True)
    environment = (
        os.environ
        | ENVIRONMENT
        | {
            "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "VLLM_PLUGINS": "",
            "VLLM_LOGGING_LEVEL": "CRITICAL",
        }
    )
    command = [sys.executable, "-W", "ignore", "-m", "tests.engine.harness.video_tree"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["vllm"] == str(tmp_path / "vllm" / "__init__.py")
    assert len(report["same"]) >= 5 * 12
    assert [case for case, same in report["same"].items() if not same] == []
