"""Run a test suite (`make check`, `make test`, `make test-long`, `make test-cuda`) and end with a line of its result.

`.venv` (with vLLM-Omni) runs all but vLLM's own tests; `.venv-latest` those, and all tests that reach vLLM; in each
several processes share the tests (`tests/support/forked.py`), by groups that share engines. An environment collects its
tests while the one before it runs its own; then they take turns. `.venv-cuda`, without vLLM, runs the tests on the
double of CUDA; where they need an engine, they start one of `.venv`, and vLLM's model runner V2 comes from the Python
files of `.venv-latest`.
A test that is skipped for a reason that is not in ``EXPECTED_SKIPS`` is one that this machine should have run: the
suite then fails, and the last lines say what is missing.
Environment: PYTEST, further arguments for pytest, as in PYTEST="-k scheduler -x"; VENVS, as in VENVS=.venv-latest;
WORKERS, how many processes run tests at the same time; SKIPS=allowed where a machine cannot run everything.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from dev.child_process import ChildProcess
from dev.environment import system_packages

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / ".logs"
# folders that run in .venv alone, whatever they import
ONCE = ["benchmarks", "contracts", "deploy", "dev", "docs", "examples", "omni", "patches"]
# folders of which the tests that can reach a line that imports vLLM run on each version of it
BY_IMPORTS = ["properties", "unit"]
PACKAGES = ("vllm_omni_sched", "tests", "benchmarks", "dev", "examples", "patches")
MODULE = re.compile(rf"\b(?:{'|'.join(PACKAGES)})(?:\.\w+)+")
NAMES_OF_A_MODULE = re.compile(r"^\s*from ([\w.]+) import (?:\(([^)]*)\)|(.*))", re.MULTILINE)
VLLM = re.compile(
    r"^\s*(?:from|import) vllm\b|[\"'`]vllm\.\w+\.\w|(?:import_module|importorskip|find_spec)\(\s*[\"']vllm\b",
    re.MULTILINE,
)


@cache
def _reads(file: Path) -> tuple[bool, frozenset[Path]]:
    """Return whether a file names vLLM, and the files of this repository that it names, in imports or in strings."""
    text = file.read_text()
    names = set(MODULE.findall(text))
    for module, *lists in NAMES_OF_A_MODULE.findall(text):
        if module.split(".")[0] in PACKAGES:
            names |= {f"{module}.{name}" for name in re.findall(r"\w+", " ".join(lists))}
    return bool(VLLM.search(text)), frozenset(file for name in names for file in _files_of(name))


def _files_of(name: str) -> list[Path]:
    """Return the file of a module; of a name with further parts (a function, say), that of its module."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:length])
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return [file]
    return []


def reaches_vllm(test: Path) -> bool:
    """Return whether a test, or a file of this repository that it uses, directly or not, names vLLM."""
    seen = {test, *(folder / "conftest.py" for folder in test.parents if folder.is_relative_to(ROOT / "tests"))}
    seen = {file for file in seen if file.is_file()}
    open_ = list(seen)
    while open_:
        names_vllm, used = _reads(open_.pop())
        if names_vllm:
            return True
        open_ += used - seen
        seen |= used
    return False


CUDA_DOUBLE = "cuda_double"
"""Folder of the tests that run in .venv-cuda, and nowhere else."""


def _without(*folders: str) -> list[str]:
    return ["tests", *(f"--ignore=tests/{folder}" for folder in sorted(folders))]


def _where_versions_matter() -> list[str]:
    tests = sorted(test for folder in BY_IMPORTS for test in (ROOT / "tests" / folder).rglob("test_*.py"))
    once = (f"--ignore={test.relative_to(ROOT)}" for test in tests if not reaches_vllm(test))
    return [*_without(*ONCE, CUDA_DOUBLE), *once]


def _both() -> dict[str, list[str]]:
    """Return what runs in each environment: vLLM's own tests judge our classes on the newest vLLM alone."""
    return {".venv": _without("upstream", CUDA_DOUBLE), ".venv-latest": _where_versions_matter()}


def _on_cuda_double() -> dict[str, list[str]]:
    return {".venv-cuda": [f"tests/{CUDA_DOUBLE}"]}


def _everywhere() -> dict[str, list[str]]:
    return _both() | _on_cuda_double()


@dataclass(frozen=True)
class Suite:
    command: str
    environments: Callable[[], Mapping[str, Sequence[str]]]
    """Returns the arguments for pytest in each environment."""
    options: Sequence[str]
    workers: int = 2
    """Number of processes that run tests; more help where tests wait for other processes, and start no engine."""
    needs_models: bool = True
    beside: Sequence[str] = ()
    """Command that runs at the same time as the tests, and must succeed as well."""


SUITES = {
    suite.command: suite
    for suite in (
        Suite(
            "check",
            lambda: {".venv": ["tests/contracts", "tests/properties", "tests/unit"]},  # the longest files first
            ["-m", "not long and not slow"],
            workers=4,
            beside=("make", "--no-print-directory", "lint"),
        ),
        Suite("test", _both, ["-m", "not long"]),
        Suite("test-long", _everywhere, ["-m", "long", "--hypothesis-profile=long"]),
        Suite("test-cuda", _on_cuda_double, [], needs_models=False),
    )
}
SLOWEST = 10
LINES_OF_BESIDE = 200
POLL_SECONDS = 0.2
NO_TESTS_COLLECTED, NOT_FOUND = 5, 4
EXPECTED_SKIPS = {
    "no CUDA device": r"CUDA device|a card|green contexts",
    "not in this version of vLLM": r"this vLLM|vLLM [0-9.]+ (has|lacks|knows|runs|needs)|before vLLM",
    "not in this kernel or C library": r"this kernel|this C library",
    "no C compiler": r"^no C compiler$",
    "an optional package": r"^arctic_inference is not installed$",
    "a package of .venv alone": r"is in \.venv alone$",
    "does not apply": r"nothing ever waits or runs in it|^its work is killed, or has ended$",
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
    seconds: Mapping[str, float] = field(default_factory=dict, repr=False)
    """Duration of each test, with the fixtures that it was the first to need."""

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


def slowest(outcomes: Iterable[Outcome], count: int = SLOWEST) -> list[str]:
    """Return a line for each of the slowest tests, the slowest first."""
    tests = [(took, name, outcome.venv) for outcome in outcomes for name, took in outcome.seconds.items()]
    return [f"{took:6.1f} s  {name} ({venv})" for took, name, venv in sorted(tests, reverse=True)[:count]]


def main(command: str = "test") -> int:
    started = time.monotonic()
    LOGS.mkdir(exist_ok=True)
    suite, title = SUITES[command], f"make {command}"
    environments = suite.environments()
    venvs = os.environ.get("VENVS", "").split() or list(environments)
    if unknown := [venv for venv in venvs if venv not in environments]:
        known = " and ".join(environments)
        print(f"{title}: it does not run in {unknown[0]}, only in {known}", file=sys.stderr)
        return 2
    skips_allowed = os.environ.get("SKIPS") == "allowed" or bool(os.environ.get("PYTEST"))
    if ".venv" in venvs and not skips_allowed and (missing := system_packages.missing(ROOT / ".venv")):
        advice = system_packages.advice(missing)
        print(f"{title}: {advice}, or set SKIPS=allowed to do without these tests", file=sys.stderr)
        return 2
    try:
        with _beside(suite) as beside:
            outcomes = _run(suite, {venv: environments[venv] for venv in venvs})
    except KeyboardInterrupt:
        print(f"\n{title}: interrupted", file=sys.stderr)
        return 130
    ok = all(outcome.ok for outcome in outcomes) and any(outcome.passed for outcome in outcomes)
    results = [str(outcome) for outcome in outcomes]
    if beside is not None:
        ok &= beside.exit_code == 0
        print("\n" + "\n".join(beside.last_lines(LINES_OF_BESIDE)), flush=True)
        results.append(f"`{shlex.join(suite.beside)}` {'passed' if beside.exit_code == 0 else 'failed'}")
    if lines := slowest(outcomes):
        print("\nslowest tests, with the engines that they were the first to need:", flush=True)
        print("\n".join(f"  {line}" for line in lines), flush=True)
    if unexpected := unexpected_skips(outcomes):
        ok &= skips_allowed
        print(f"\n{title}: skipped, though this machine should run them (SKIPS=allowed accepts it):", flush=True)
        print("\n".join(f"  {line}" for line in unexpected), flush=True)
    verdict = "OK" if ok else "FAILED"
    print(f"\n{title}: {verdict}  {'; '.join(results)}; {_duration(time.monotonic() - started)}", flush=True)
    return 0 if ok else 1


@contextmanager
def _beside(suite: Suite) -> Iterator[ChildProcess | None]:
    """Run the suite's other command meanwhile; it has ended when the context is left."""
    if not suite.beside or os.environ.get("PYTEST"):
        yield None
        return
    with ChildProcess(suite.beside, log=LOGS / f"{suite.command}.beside.log", env={}) as process:
        yield process
        process.wait()


def _write_models() -> None:
    """Write the tiny models before any test, so that engines started at the same time find them."""
    from dev.tiny_models import write_llama, write_llava, write_qwen2_vl, write_voxtral_realtime

    write_llama(ROOT / ".models" / "llama")
    write_llava(ROOT / ".models" / "llava")
    write_llava(ROOT / ".models" / "llava-4-tokens", image_size=28)
    write_qwen2_vl(ROOT / ".models" / "qwen2-vl")
    write_voxtral_realtime(ROOT / ".models" / "voxtral-realtime")


def _run(suite: Suite, selections: Mapping[str, Sequence[str]]) -> list[Outcome]:
    """Run the tests of a suite in its environments; each collects its tests while the one before it runs its own.

    The models are written while the first environment collects.
    """
    started: list[_Pytest] = []
    with ExitStack() as stack:
        turn, first_turn = os.pipe()
        for number, (venv, selection) in enumerate(selections.items(), 1):
            following = os.pipe() if number < len(selections) else None
            begins = f"[{number}/{len(selections)}] {venv}"
            started.append(_Pytest(suite, venv, selection, begins, turn, following and following[1]))
            stack.callback(started[-1].wait)
            turn = following[0] if following else turn
            if number == 1:
                try:
                    if suite.needs_models:
                        print("writing the tiny models", flush=True)
                        _write_models()
                except BaseException:
                    started[0].end()
                    raise
                finally:
                    os.close(first_turn)  # now it is the turn of the first environment
        return [one.outcome() for one in started]


class _Pytest:
    """Runs the tests of a suite in one environment.

    Args:
        begins: line that is printed before what it says. What it says goes to a log until `outcome` is called.
        turn: pipe that tells it when to begin (see `tests/support/forked.py`). It is closed here.
        following: pipe by which it lets the next environment begin. It is closed here.
    """

    def __init__(
        self, suite: Suite, venv: str, selection: Sequence[str], begins: str, turn: int, following: int | None
    ) -> None:
        self._venv, self._begins = venv, begins
        self._report = LOGS / f"{suite.command}{venv}.xml"
        self._report.unlink(missing_ok=True)
        self._log = LOGS / f"{suite.command}{venv}.log"
        environment = {
            **os.environ,
            "PATH": f"{ROOT / venv / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            # another one in each run; it is passed on to programs that tests start
            "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED") or str(secrets.randbelow(1 << 32)),
        }
        command = [str(ROOT / venv / "bin" / "python"), "-u", "-m", "pytest", f"--junit-xml={self._report}"]
        # CUDA does not survive a fork
        workers = 1 if venv == ".venv-cuda" else os.environ.get("WORKERS") or suite.workers
        pipes = [turn] if following is None else [turn, following]
        command += ["-p", "tests.support.forked", f"--processes={workers}", f"--turns={','.join(map(str, pipes))}"]
        command += ["--benchmark-disable"]  # no figures from processes that share a machine
        command += ["--color=yes"] if sys.stdout.isatty() else []
        command += [*suite.options, *selection, *shlex.split(os.environ.get("PYTEST", ""))]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, pass_fds=pipes
            )
        for pipe in pipes:
            os.close(pipe)

    def outcome(self) -> Outcome:
        """Print what it says until it has ended, and return how it ended."""
        print(f"\n{self._begins}", flush=True)
        with self._log.open(errors="replace") as log:
            ended = False
            while not ended:
                ended = self._process.poll() is not None
                if said := log.read():
                    print(said, end="", flush=True)
                elif not ended:
                    time.sleep(POLL_SECONDS)
        return _read(self._report, self._venv, self._process.returncode)

    def end(self) -> None:
        """Ask it to end, before its turn has come."""
        self._process.terminate()

    def wait(self) -> None:
        self._process.wait()  # Ctrl-C has reached it as well; it ends its engines


def _read(report: Path, venv: str, exit_code: int) -> Outcome:
    try:
        suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    except (OSError, ElementTree.ParseError):  # pytest did not get as far as that
        return Outcome(venv, exit_code)

    def total(what: str) -> int:
        return sum(int(suite.get(what, 0)) for suite in suites)

    failed = total("failures") + total("errors")
    skips = tuple(skip.get("message", "") for suite in suites for skip in suite.iter("skipped"))
    seconds = {
        f"{test.get('classname')}::{test.get('name', '')}": float(test.get("time", 0))
        for suite in suites
        for test in suite.iter("testcase")
    }
    passed = total("tests") - failed - len(skips)
    return Outcome(venv, exit_code, passed=passed, failed=failed, skips=skips, seconds=seconds)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
