"""Give the files of `tests/support/stage_files.py` to ``doctor`` and to vLLM-Omni's engine.

`python -m tests.omni.harness.refused_files FOLDER MODEL` prints what each says, as JSON in the last line. No stage is
started: where all checks have passed, the engine is stopped.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from dev.omni_cpu.deploy import write_deploy
from dev.omni_cpu.spec import TEXT_TO_SOUND, PipelineSpec
from tests.support.stage_files import GOOD, REFUSED, StageFile

PASSED = "all checks have passed"
CONNECTOR = {"c": {"name": "SharedMemoryConnector", "extra": {}}}


def write(case: StageFile, folder: Path) -> tuple[Path, Path]:
    """Return the deploy YAML, and a file of the options alone."""
    folder.mkdir()
    options = case.options.replace("{folder}", str(folder))
    for name, text in case.files.items():
        (folder / name).write_text(text)
    plain = yaml.safe_load(
        write_deploy(PipelineSpec(TEXT_TO_SOUND, "full_payload", ""), folder / "plain.yaml").read_text()
    )
    for number, more in case.stages.items():
        plain["stages"][number] |= more
    if any("connectors" in key for more in case.stages.values() for key in more):
        plain["connectors"] = CONNECTOR
    file, alone = folder / "deploy.yaml", folder / "alone.yaml"
    file.write_text(f"{yaml.safe_dump(plain, sort_keys=False)}{case.key}: {options}\n")
    alone.write_text(options + "\n")
    return file, alone


def doctor(file: Path) -> list[str]:
    from vllm_omni_sched.cli.diagnosis import diagnose_stages

    return diagnose_stages(file).problems


def started(file: Path, model: str) -> str | None:
    """Return what the engine says at its start; None where it would start its stages."""
    from vllm_omni.engine.stage_runtime import StageRuntime
    from vllm_omni.entrypoints.async_omni import AsyncOmni

    with mock.patch.object(StageRuntime, "_before_initialize_stage_replicas", side_effect=RuntimeError(PASSED)):
        try:
            AsyncOmni(model=model, deploy_config=str(file), stage_init_timeout=60, init_timeout=60).shutdown()
        except Exception as error:  # noqa: BLE001  the test says what it must be
            return None if PASSED in str(error) else str(error)
    return "it started"


def outcome(case: StageFile, folder: Path, model: str) -> dict[str, Any]:
    from vllm_omni_sched.config.stage_yaml import VARIABLE

    file, alone = write(case, folder)
    found: dict[str, Any] = {"doctor": doctor(file), "start": started(file, model), "alone": None}
    if case.alone and case.says:
        found["alone"] = doctor(alone)
        with mock.patch.dict(os.environ, {VARIABLE: str(alone)}):
            found["alone_start"] = started(folder / "plain.yaml", model)
    return found


def main(folder: str, model: str) -> None:
    from vllm_omni.plugins import load_omni_general_plugins

    load_omni_general_plugins()
    results = {}
    for name, case in {**REFUSED, **GOOD}.items():
        results[name] = outcome(case, Path(folder) / name.replace(" ", "-"), model)
        print(name, results[name], flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
