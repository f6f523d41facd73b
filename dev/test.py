"""`make test`: the whole test suite on each supported environment, ended by one line that says what happened.

`.venv` (with vLLM-Omni) runs all but vLLM's own tests; `.venv-latest` those, and what another vLLM may change.
A test that is skipped for a reason that is not in ``EXPECTED_SKIPS`` is one that this machine should have run: the
suite then fails, and the last lines say what is missing.
Environment: PYTEST, further arguments for pytest, e.g. PYTEST="-k scheduler -x"; VENVS, e.g. VENVS=.venv-latest;
SKIPS=allowed where a machine cannot run everything.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from dev.environment import system_packages

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / ".logs"
# tests of what knows no vLLM
PURE = ["benchmarks", "contracts", "dev", "docs", "omni", "patches"]
PURE += [f"unit/{room}" for room in ("connectors", "graph", "items", "monitor", "resource", "sim")]
FOLDERS = {folder.name for folder in (ROOT / "tests").iterdir() if folder.is_dir()}


def _without(*folders: str) -> list[str]:
    return [f"--ignore=tests/{folder}" for folder in sorted(folders)]


SUITES = {  # the parts of one suite run beside each other: both wait a lot
    # the latest vLLM's own tests judge our classes
    ".venv": [_without("engine", "upstream"), _without(*FOLDERS - {"engine"})],
    ".venv-latest": [_without(*PURE)],
}
NO_TESTS_COLLECTED, NOT_FOUND = 5, 4
EXPECTED_SKIPS = {
    "no CUDA device": r"CUDA device|a card|green contexts",
    "not in this version of vLLM": r"this vLLM|vLLM [0-9.]+ (has|lacks|knows|runs|needs)|before vLLM",
    "not in this kernel or C library": r"this kernel|this C library",
    "does not apply": r"nothing ever waits or runs in it",
}
"""Why a test may be skipped on any machine of the project, with a pattern of the reasons that tests give."""


@dataclass(frozen=True)
class Outcome:
    venv: str
    exit_code: int
    passed: int = 0
    failed: int = 0
    skips: tuple[str, ...] = field(default=(), repr=False)
    """Reason of each skipped test."""

    @property
    def ok(self) -> bool:
        """A selection with PYTEST may well leave one part without a test, but a whole suite may not."""
        chosen = bool(os.environ.get("PYTEST"))
        return self.exit_code == 0 or (chosen and self.exit_code in (NO_TESTS_COLLECTED, NOT_FOUND))

    def __str__(self) -> str:
        counts = [f"{self.passed} passed"]
        counts += [f"{self.failed} failed"] if self.failed else []
        if self.skips:
            reasons = Counter(kind_of_skip(reason) or "unexpected" for reason in self.skips)
            counts += [f"{len(self.skips)} skipped ({', '.join(f'{n} {why}' for why, n in reasons.most_common())})"]
        if not self.ok and not self.failed:
            counts += [f"pytest ended with exit code {self.exit_code}"]
        return f"{', '.join(counts)} in {self.venv}"


def kind_of_skip(reason: str) -> str | None:
    """Return the kind of ``EXPECTED_SKIPS`` that a reason is of, None if this machine should have run the test."""
    return next((kind for kind, pattern in EXPECTED_SKIPS.items() if re.search(pattern, reason)), None)


def unexpected_skips(outcomes: Iterable[Outcome]) -> list[str]:
    """Return a line for each reason for which tests were skipped that this machine should have run."""
    reasons = Counter(
        (outcome.venv, reason) for outcome in outcomes for reason in outcome.skips if kind_of_skip(reason) is None
    )
    return [f"{number} in {venv}: {reason}" for (venv, reason), number in reasons.most_common()]


def main() -> int:
    started = time.monotonic()
    LOGS.mkdir(exist_ok=True)
    venvs = os.environ.get("VENVS", "").split() or list(SUITES)
    if unknown := [venv for venv in venvs if venv not in SUITES]:
        print(f"make test: there is no environment {unknown[0]}, only {' and '.join(SUITES)}", file=sys.stderr)
        return 2
    skips_allowed = os.environ.get("SKIPS") == "allowed" or bool(os.environ.get("PYTEST"))
    if ".venv" in venvs and not skips_allowed and (missing := system_packages.missing(ROOT / ".venv")):
        advice = system_packages.advice(missing)
        print(f"make test: {advice}, or set SKIPS=allowed to do without these tests", file=sys.stderr)
        return 2
    try:
        print("writing the tiny models", flush=True)
        _write_models()
        outcomes = []
        for number, venv in enumerate(venvs, 1):
            print(f"\n[{number}/{len(venvs)}] {venv}", flush=True)
            outcomes += _run(venv)
    except KeyboardInterrupt:
        print("\nmake test: interrupted", file=sys.stderr)
        return 130
    ok = all(outcome.ok for outcome in outcomes) and any(outcome.passed for outcome in outcomes)
    if unexpected := unexpected_skips(outcomes):
        ok &= skips_allowed
        print("\nmake test: skipped, though this machine should run them (SKIPS=allowed accepts it):", flush=True)
        print("\n".join(f"  {line}" for line in unexpected), flush=True)
    verdict = "OK" if ok else "FAILED"
    print(
        f"\nmake test: {verdict}  {'; '.join(map(str, outcomes))}; {_duration(time.monotonic() - started)}",
        flush=True,
    )
    return 0 if ok else 1


def _write_models() -> None:
    """Before any test, in this one process: engines started at the same time then find them there."""
    from dev.tiny_models import write_llama, write_llava, write_voxtral_realtime

    write_llama(ROOT / ".models" / "llama")
    write_llava(ROOT / ".models" / "llava")
    write_voxtral_realtime(ROOT / ".models" / "voxtral-realtime")


def _run(venv: str) -> list[Outcome]:
    """The parts of a suite, at the same time; all but the first tell in the end what they have to say."""
    parts, arguments = SUITES[venv], shlex.split(os.environ.get("PYTEST", ""))
    reports = [LOGS / f"test{venv}{'-' + str(number) if number else ''}.xml" for number in range(len(parts))]
    environment = {
        **os.environ,
        "PATH": f"{ROOT / venv / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with ExitStack() as open_files:
        running: list[subprocess.Popen[bytes]] = []
        for part, report in zip(parts, reports, strict=True):
            report.unlink(missing_ok=True)
            command = [str(ROOT / venv / "bin" / "python"), "-m", "pytest", f"--junit-xml={report}", *part, *arguments]
            said = open_files.enter_context(report.with_suffix(".log").open("wb")) if running else None
            running.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=said, stderr=said))
        try:
            exit_codes = [pytest.wait() for pytest in running]
        except KeyboardInterrupt:
            for pytest in running:
                pytest.wait()  # Ctrl-C has reached it as well; it ends its engines
            raise
    for report in reports[1:]:
        print(report.with_suffix(".log").read_text(errors="replace"), flush=True)
    return [_read(report, venv, exit_code) for report, exit_code in zip(reports, exit_codes, strict=True)]


def _read(report: Path, venv: str, exit_code: int) -> Outcome:
    try:
        suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    except (OSError, ElementTree.ParseError):  # pytest did not get as far as that
        return Outcome(venv, exit_code)

    def total(what: str) -> int:
        return sum(int(suite.get(what, 0)) for suite in suites)

    failed = total("failures") + total("errors")
    skips = tuple(skip.get("message", "") for suite in suites for skip in suite.iter("skipped"))
    return Outcome(venv, exit_code, passed=total("tests") - failed - len(skips), failed=failed, skips=skips)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


if __name__ == "__main__":
    sys.exit(main())
