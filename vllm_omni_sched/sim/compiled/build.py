"""Compile the modules of the simulator, and of the policies that it runs most often, with mypyc."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from vllm_omni_sched.sim.compiled import FOLDER, MANIFEST, PACKAGE, fingerprint

SECONDS = 1800

MODULES = (
    "core.engine.core",
    "core.engine.encode_ahead",
    "core.engine.ledger",
    "core.engine.requests",
    "core.engine.step_limits",
    "graph.order",
    "graph.waiting_queue",
    "monitor.step_times",
    "resource.engine.lane",
    "resource.engine.prefill_budget",
    "resource.engine.worth",
    "resource.pipeline.balance",
    "resource.pipeline.stage_cost",
    "resource.pipeline.work_left",
    "resource.rate",
    "sim.costs.roofline",
    "sim.engine.ahead",
    "sim.engine.decoding",
    "sim.engine.encoding",
    "sim.engine.front",
    "sim.engine.hosted",
    "sim.engine.lane",
    "sim.engine.leap",
    "sim.engine.placed",
    "sim.engine.prefixes",
    "sim.engine.prompts",
    "sim.engine.sequence",
    "sim.engine.server",
    "sim.engine.steps",
    "sim.engine.transfer",
    "sim.engine.view",
    "sim.engine.waiting",
    "sim.kernel",
    "sim.measure",
    "sim.pools.choose",
    "sim.pools.gated",
    "sim.pools.pipeline",
    "sim.pools.pool",
    "sim.pools.replicas",
    "sim.pools.request_run",
    "sim.server",
)
"""Compiled modules of the package. A class and its subclasses are compiled together, or none of them."""


class BuildError(Exception):
    """Explains in one line why the modules could not be built."""


def build(folder: Path = FOLDER, package: Path = PACKAGE, level: str = "3") -> Path:
    """Compile the modules for the running Python into a folder, which replaces a former one; return it.

    Args:
        level: how much the C compiler optimises, from "0" to "3". Nearly all of the time is spent there.

    Raises:
        BuildError: mypyc or a C compiler is missing, or compiling fails.
    """
    missing = [one for one in ("mypyc", "setuptools") if importlib.util.find_spec(one) is None]
    if missing:
        raise BuildError(f"{' and '.join(missing)} cannot be imported: pip install mypy setuptools")
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
    if shutil.which(compiler) is None:
        raise BuildError(f"the C compiler {compiler} cannot be run: not found")
    before = fingerprint(package)
    if not os.access(folder.parent, os.W_OK):
        raise BuildError(f"{folder.parent} cannot be written: build as the user who installed the package")
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".build-") as scratch:
        command = [sys.executable, str(Path(__file__).with_name("compile.py")), level, str(package), *MODULES]
        try:
            done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired as error:
            raise BuildError(f"compiling took longer than {SECONDS} s") from error
        if done.returncode:
            lines = [line for line in (done.stdout + done.stderr).splitlines() if "error" in line.lower()]
            raise BuildError(f"mypyc cannot compile the modules: {'; '.join(lines[:3]) or 'no reason given'}")
        made = Path(scratch, "lib")
        files = sorted(one.relative_to(made) for one in made.rglob(f"*{sysconfig.get_config_var('EXT_SUFFIX')}"))
        modules = {".".join(one.with_name(one.name.split(".")[0]).parts): one.as_posix() for one in files}
        if fingerprint(package) != before:
            raise BuildError("a source changed meanwhile: build again")
        manifest = {"fingerprint": before, "modules": modules}
        (made / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        made.replace(folder)
    return folder


def main() -> int:
    """Build the modules for this checkout."""
    try:
        print(f"built {build()}")
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
