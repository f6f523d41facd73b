"""`python -m tests.omni.harness.main FOLDER MODEL PREFIX`: run each pipeline whose spec appears in FOLDER, by number.

`N.spec.json` asks, `N.results.json` answers, `end` in FOLDER ends it; PREFIX begins the names of all requests.
`{"scenarios": {name: {...}}, "seconds": {...}, "children_left": [...], "shm_left": [...], "error": traceback}`,
the last None if all went well. It is started with vLLM-Omni imported (`processes.start_warm`), and what it spawns is
forked; it runs many pipelines all the same, for what they import besides.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import psutil

from dev.omni_cpu.running import running
from tests.omni.harness.branch_scenarios import BRANCH_SCENARIOS, BRANCHES_ALONE
from tests.omni.harness.fault_scenarios import FAULT_SCENARIOS
from tests.omni.harness.hang_scenarios import HANG_SCENARIOS
from tests.omni.harness.move_scenarios import MOVE_SCENARIOS
from tests.omni.harness.picture_scenarios import PICTURE_SCENARIOS
from tests.omni.harness.refused_scenario import REFUSED_SCENARIO
from tests.omni.harness.scenarios import SCENARIOS, blocking
from tests.omni.harness.spec import SHM, RunSpec
from tests.omni.harness.stage_scenarios import EDGE_SCENARIOS, STAGE_SCENARIOS

ALL_SCENARIOS = SCENARIOS | STAGE_SCENARIOS | EDGE_SCENARIOS | HANG_SCENARIOS | MOVE_SCENARIOS | PICTURE_SCENARIOS
ALL_SCENARIOS |= REFUSED_SCENARIO | FAULT_SCENARIOS | BRANCH_SCENARIOS | BRANCHES_ALONE
SCENARIO_SECONDS = 240
POLL_SECONDS = 0.1
END_SECONDS = 10


def main(folder_name: str, model: str, prefix: str) -> None:
    folder, parent = Path(folder_name), os.getppid()
    for number in itertools.count():
        spec_file = folder / f"{number}.spec.json"
        while not spec_file.exists():
            if (folder / "end").exists() or os.getppid() != parent:  # who asks is gone
                return
            time.sleep(POLL_SECONDS)
        spec = RunSpec(**json.loads(spec_file.read_text()))
        print(f"=== {number}: {spec}", flush=True)
        draft = folder / f"{number}.draft"
        draft.write_text(json.dumps(run(spec, Path(model), folder, f"{prefix}x{number}")))
        draft.rename(folder / f"{number}.results.json")


def run(spec: RunSpec, model: Path, folder: Path, prefix: str) -> dict[str, Any]:
    results: dict[str, Any] = {"scenarios": {}, "seconds": {}, "error": None}
    started = time.monotonic()
    try:
        with running(spec, model=model, folder=folder) as omni:
            results["seconds"]["start"] = time.monotonic() - started
            asyncio.run(_drive(omni, spec, prefix, results))
            started = time.monotonic()
        results["seconds"]["stop"] = time.monotonic() - started
    except Exception:  # noqa: BLE001  whatever it is, the test that reads the results shows it
        results["error"] = traceback.format_exc()
        print(results["error"], flush=True)
    results["children_left"] = _children_left()
    results["shm_left"] = sorted(file.name for file in SHM.iterdir() if f"{prefix}-" in file.name)
    return results


def _children_left() -> list[str]:
    for child in multiprocessing.active_children():
        child.join(END_SECONDS)  # vLLM-Omni may just have killed it
    return [child.name for child in multiprocessing.active_children()]


async def _drive(omni: Any, spec: RunSpec, prefix: str, results: dict[str, Any]) -> None:
    if spec.entrypoint == "Omni":
        results["scenarios"]["blocking"] = blocking(omni, spec)
        results["processes"] = [child.name() for child in psutil.Process().children(recursive=True)]
        return
    for name in spec.scenarios:
        print(f"--- scenario {name}", flush=True)
        started = time.monotonic()
        async with asyncio.timeout(SCENARIO_SECONDS):
            results["scenarios"][name] = await ALL_SCENARIOS[name](omni, spec, f"{prefix}-{name}")
        results["seconds"][name] = time.monotonic() - started


if __name__ == "__main__":
    main(*sys.argv[1:])
