"""Run engines in processes of their own, stock and ours side by side."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from dev.child_process import ChildProcess
from tests.engine.harness.spec import EngineSpec
from tests.support.warm import WarmPopen

ROOT = Path(__file__).parents[3]
CACHE = ROOT / ".cache" / "engines"
PATIENCE_SECONDS = 1500  # a hang is a failure; that a busy machine is slow is none

ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # one thread an engine: two engines share the machine, and sums are added up in one order
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
# vLLM reads an allow-list here: an empty one keeps every plugin out.
NO_PLUGIN = {"VLLM_PLUGINS": ""}
OUR_PLUGIN = {"VLLM_PLUGINS": "omni_sched"}
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
# What the same variable means to `vllm serve`: on a CPU, one process less, and with it 10 s of imports.
WORKER_IN_ENGINE_CORE = IN_PROCESS


class Side:
    """One process that runs `specs` one after the other."""

    def __init__(self, name: str, specs: Sequence[EngineSpec], environment: Mapping[str, str], folder: Path) -> None:
        self.name = name
        self._results = folder / f"{name}.json"
        specs_file = folder / f"{name}.specs.json"
        specs_file.write_text(json.dumps([spec.to_json() for spec in specs]))
        self._results.write_text("{}")
        self.process = ChildProcess(
            [sys.executable, "-m", "tests.engine.harness.main", str(specs_file), str(self._results)],
            log=folder / f"{name}.log",
            env={**ENVIRONMENT, **environment},
            start=WarmPopen,
        )

    def results(self) -> dict[str, Any]:
        """Return what the process has written; an engine that ended the process is missing from it."""
        results: dict[str, Any] = json.loads(self._results.read_text())
        if self.process.exit_code != 0:
            tail = "\n".join(self.process.last_lines(40))
            results["process"] = f"{self.name}: exit code {self.process.exit_code}\n{tail}"
        return results


def run_program(module: str, *arguments: object, environment: Mapping[str, str], log: Path) -> Any:
    """Run `python -m module arguments` with vLLM imported already, and return the JSON in its last line that is any.

    Args:
        environment: what it gets beside `ENVIRONMENT`.
        log: file for its output and its errors.

    Raises:
        AssertionError: it failed; the message has the end of its log.
    """
    command = [sys.executable, "-m", module, *map(str, arguments)]
    with ChildProcess(command, log=log, env={**ENVIRONMENT, **environment}, start=WarmPopen) as process:
        code = process.wait()
    assert code == 0, f"{module}: exit code {code}\n" + "\n".join(process.last_lines(40))
    return json.loads(next(line for line in reversed(log.read_text().splitlines()) if line.startswith(("{", "["))))


def wait_for(sides: Sequence[Side]) -> None:
    """Return when all have ended, or after `PATIENCE_SECONDS`; leaving their contexts ends them."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while any(side.process.exit_code is None for side in sides) and time.monotonic() < deadline:
        time.sleep(0.05)


def run_side_by_side(
    folder: Path,
    stock: Sequence[EngineSpec],
    ours: Sequence[EngineSpec],
    *,
    stock_environment: Mapping[str, str],
    our_environment: Mapping[str, str],
    kept: Path | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the results of both (see `main.py`); those of stock are read from the file `kept` if it is there."""
    folder.mkdir(parents=True, exist_ok=True)
    known: dict[str, Any] | None = json.loads(kept.read_text()) if kept is not None and kept.is_file() else None
    with ExitStack() as stack:
        side_of_ours = Side("ours", ours, our_environment, folder)
        stack.enter_context(side_of_ours.process)
        if known is not None:
            wait_for([side_of_ours])
            return known, side_of_ours.results()
        side_of_stock = Side("stock", stock, stock_environment, folder)
        stack.enter_context(side_of_stock.process)
        wait_for([side_of_stock, side_of_ours])
        results = side_of_stock.results()
        if kept is not None and "process" not in results and all(one["error"] is None for one in results.values()):
            keep(results, kept)
        return results, side_of_ours.results()


def file_of_stock(name: str, specs: Sequence[EngineSpec], environment: Mapping[str, str]) -> Path:
    """Return where the results of stock engines are kept; the file's name changes with all that they depend on.

    That is the engines and their models, the harness, the installed packages and the processor, but nothing of ours.
    """
    packages = sorted(f"{found.name} {found.version}" for found in distributions() if found.name != "vllm-omni-sched")
    processor = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")][:1]
    asked = json.dumps([[spec.to_json() for spec in specs], {**ENVIRONMENT, **environment}]).replace(str(ROOT), "")
    digest = hashlib.sha256("\0".join([sys.version, *packages, *processor, asked]).encode())
    models = {file for spec in specs for file in Path(spec.model).rglob("*") if file.is_file()}
    for file in sorted([*Path(__file__).parent.glob("*.py"), *models]):
        digest.update(file.read_bytes())
    return CACHE / f"{Path(sys.prefix).name}-{name}-{digest.hexdigest()[:16]}.json"


def keep(results: dict[str, Any], file: Path) -> None:
    """Write results for later runs, in place of those that are outdated."""
    CACHE.mkdir(parents=True, exist_ok=True)
    for outdated in CACHE.glob(f"{file.name.rpartition('-')[0]}-*"):
        outdated.unlink(missing_ok=True)
    draft = file.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(results))
    draft.rename(file)


def write_model(name: str, out: Path, **sizes: int) -> Path:
    """Let `dev.tiny_models` write a model, in a process of its own: what it imports changes warnings and more."""
    options = [word for key, value in sizes.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    subprocess.run(
        [sys.executable, "-m", "dev.tiny_models", name, "--out", str(out), *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return out
