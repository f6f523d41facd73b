"""Run a part in a process of its own, for no longer than its bound, and read what it leaves."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import Ended, Outcome, Part
from benchmarks.harness.provenance import ROOT

GRACE_SECONDS = 10.0
NO_GPU = 2


def run(part: Part, folder: Path, python: str = sys.executable) -> Ended:
    """Run a part with its results in ``folder``. A part that does not end in time is interrupted, then killed.

    What a part writes before it complains, or before its bound, counts.
    """
    if part.lacks:
        return Ended(part, Outcome.SKIPPED, reason=part.lacks)
    folder.mkdir(parents=True, exist_ok=True)
    log, began = folder / f"{part.name}.log", time.monotonic()
    with log.open("w") as out:
        process = subprocess.Popen(
            # Parts follow one another at once: the load of the one before is not that of others.
            [python, "-m", part.module, *part.arguments, "--despite-load", "--out", str(folder)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(part.seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    took = time.monotonic() - began
    rows = read(folder, part.result)
    if code is None:
        return Ended(part, Outcome.OUT_OF_TIME, took, f"it was ended after {part.seconds:g} s", rows)
    if code == 0 and rows:
        return Ended(part, Outcome.DONE, took, "", rows)
    last = _last_line(log)
    outcome = Outcome.WRONG if rows else Outcome.FAILED
    return Ended(part, outcome, took, last or f"exit status {code} without a result", rows)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End all processes of a part: as by Ctrl-C first, so that they clean up."""
    for number in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            continue


def read(folder: Path, begin: str) -> Any:
    """Return the results of the file whose name begins so, an empty list without one."""
    for path in sorted(folder.glob(f"{begin}*.json")):
        return json.loads(path.read_text())["results"]
    return []


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][-300:] if lines else ""
