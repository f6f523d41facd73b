"""Decide for each program that the documents run whether it is run here or only read, and why."""

from __future__ import annotations

import io
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir, redirect_stdout
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from examples import chat_with_pictures, realtime_transcription, speech_with_stages, video_questions
from tests.support.documents import ROOT, Block, Call
from tests.support.prometheus import tool
from vllm_omni_sched.cli import app
from vllm_omni_sched.config.load import load_config
from vllm_omni_sched.config.stage_yaml import VARIABLE as STAGES_FILE

MODELS = ROOT / ".models"
PROGRAMS = (
    *("vllm", "vllm-omni-sched", "python", "make", "pip", "curl", "git", "promtool", "mooncake_master"),
    *("docker", "kubectl", "prometheus"),
)
SERVER = "localhost:8000"


class Way(Enum):
    """Says how far a step goes."""

    RUN = "run"
    SHORTER = "run with less work"
    RUN_BY = "run by another test"
    READ = "read by the code of the package that it is for"
    PARSED = "its arguments were accepted, and it was not run"
    LEFT = "not run"


EXECUTED = (Way.RUN, Way.SHORTER, Way.RUN_BY, Way.READ)


@dataclass
class Step:
    """A part of a block: a command, or the whole of data.

    Attributes:
        act: does it in this process; raises if it goes wrong.
        job: what `document_program` does.
        check: raises if the result of the job is wrong.
        why: the test that runs it, the arguments that make it shorter, or the reason why it is not run.
    """

    way: Way
    what: str
    act: Callable[[], None] = lambda: None
    job: Mapping[str, Any] | None = None
    check: Callable[[dict[str, Any]], None] = lambda result: None
    why: str = ""
    wrong: list[str] = field(default_factory=list)


def run_by(what: str, file: str, name: str) -> Step:
    """Return a step that a test runs; the file must have this text."""

    def act() -> None:
        assert name in (ROOT / file).read_text(), f"{file} has no {name!r}"

    return Step(Way.RUN_BY, what, act, why=file)


@dataclass(frozen=True)
class Place:
    """Where a block runs: its folder, which has the files that documents name, and a server that has metrics."""

    folder: Path
    server: str
    files: Mapping[str, Path]
    """Files that documents name by an absolute path."""
    model: Path
    """Stands in for Qwen3-Omni: a folder from which vLLM-Omni knows its pipeline."""
    clip: Path

    def here(self, text: str) -> str:
        """Return a text with the files and the server of this place."""
        for name, file in self.files.items():
            text = text.replace(name, str(file))
        return text.replace(SERVER, self.server)

    def job(self, kind: str, **more: Any) -> dict[str, Any]:
        return {"kind": kind, "folder": str(self.folder), "clip": str(self.clip), **more}


# ---- commands


def steps_of_call(call: Call, place: Place) -> Step:
    """Return what is done with a command.

    Raises:
        KeyError: nothing is known of the program.
    """
    options = option(call.arguments, "--additional-config")
    step = BY_PROGRAM[call.program](call, place)
    if options is not None:
        act = step.act

        def act_too() -> None:
            with chdir(place.folder):
                load_config(json.loads(place.here(options)))
            act()

        step.act = act_too
    return step


def option(arguments: Sequence[str], name: str) -> str | None:
    """Return the value of an option, None without it."""
    return arguments[arguments.index(name) + 1] if name in arguments else None


def ours(call: Call, place: Place) -> Step:
    """A command of this package is run, in less time where it would take long."""
    arguments = [place.here(one) for one in call.arguments]
    shorter = [*SHORTER.get(arguments[0], ())]
    if arguments[0] == "simulate" and "\n[tune]\n" in (place.folder / arguments[1]).read_text():
        shorter += SHORTER_SEARCH
    if "--metrics" in arguments:
        shorter += ["--over", "10"]  # of a server that began a moment ago
    arguments += shorter
    if arguments[0] == "doctor":
        arguments = [str(place.model) if one in ("MODEL", *REAL_OMNI) else one for one in arguments]

        def check(result: dict[str, Any]) -> None:
            assert result["status"] == 0, result["said"]

        return Step(Way.RUN, str(call), job=place.job("doctor", arguments=arguments), check=check)

    def act() -> None:
        with chdir(place.folder):
            result = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output

    return Step(Way.SHORTER if shorter else Way.RUN, str(call), act, why=shlex.join(shorter))


REAL_OMNI = ("Qwen/Qwen3-Omni-30B-A3B-Instruct",)
SHORTER = {
    "top": ("--once",),
    "plan": ("--trials", "4"),
    "record": ("--seconds", "0.2", "--interval", "0.1"),
    "tune": ("--trials", "2", "--seeds", "1", "--held-out", "2"),
    "simulate": (*("--set", "duration_seconds=20", "--set", "warm_up_seconds=5", "--set", "repeats=1", "--quiet"),),
}
SHORTER_SEARCH = (
    *("--set", "tune.trials=1", "--set", "tune.trial.duration_seconds=20", "--set", "tune.finalists=1"),
    *("--set", "tune.final_seeds=1", "--set", "workload.rate=1.0"),
)
"""Further arguments for a study that tunes its points, of a sweep of rates the first one."""
EXAMPLES = (chat_with_pictures, realtime_transcription, video_questions, speech_with_stages)
OPTIONS_OF_EXAMPLES = {
    (*example.SERVING.options, *example.SERVING.real_options): example.__name__.rpartition(".")[2]
    for example in EXAMPLES
}
ON_HOSTS = "--omni-master-address"


def vllm(call: Call, place: Place) -> Step:
    """vLLM reads the arguments. An engine answers by them, unless a test starts a server with the same options."""
    _, model, *options = call.arguments
    arguments = ["serve", model, *map(place.here, options)]
    omni, what = "--omni" in options, str(call)
    job = place.job("serve", arguments=arguments, variables=dict(call.variables), model=None)
    if (example := OPTIONS_OF_EXAMPLES.get(tuple(options))) is not None:
        step = run_by(what, "tests/examples/test_examples.py", f"def test_{example}(")
        step.job = job
        return step
    if ON_HOSTS in options:
        step = run_by(what, "tests/omni/harness/hosts.py", '["--omni", "--headless", "--stage-id"')
        step.job = job
        return step
    if STAGES_FILE in call.variables:
        step = run_by(what, "tests/examples/test_examples.py", "def deploy_with_a_file_of_options(")
        step.job = job
        return step
    if omni:
        return Step(Way.PARSED, what, job=job, why="there is no tiny model of it; doctor reads its options")
    tiny = MODELS / "qwen2-vl"

    def check(result: dict[str, Any]) -> None:
        text = shlex.join(options) + json.dumps(dict(call.variables))
        assert result["tokens"] == [2, 2]
        assert result["scheduler"].startswith("vllm_omni_sched.") == ("--scheduler-cls" in options)
        assert result["encoder_cache"].startswith("vllm_omni_sched.") == ("vllm_omni_sched" in text)
        assert result["videos"] == ("omni_flashcodec" in text)

    return Step(Way.RUN, what, job={**job, "model": str(tiny)}, check=check)


def python(call: Call, place: Place) -> Step:
    """A benchmark parses its arguments, unless a test runs it; other programs are run, by this test or another one."""
    what, (first, *rest) = str(call), call.arguments
    if first.endswith(".py"):
        shorter = [one for one in SHORTER_SCRIPTS.get(first, ()) if one not in rest]
        command = [sys.executable, ROOT / first, *rest, *shorter, *(["--help"] if first in SCRIPTS else [])]

        def run() -> None:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr

        if first not in SCRIPTS:
            return Step(Way.SHORTER if shorter else Way.RUN, what, run, why=shlex.join(shorter))
        step = run_by(what, *SCRIPTS[first])
        there, step.act = step.act, lambda: (run() if rest else None, there())[1]
        return step
    assert first == "-m", what
    module, *arguments = rest
    if module in MODULES:
        return run_by(what, *MODULES[module])
    if module.startswith("examples."):
        return run_by(what, "tests/examples/test_examples.py", f"def test_{module.removeprefix('examples.')}(")
    if module == "pytest":

        def exists() -> None:
            assert [one for one in arguments if not (ROOT / one).exists()] == []

        return Step(Way.PARSED, what, exists, why="a benchmark of minutes")
    if module == "benchmarks":

        def listing() -> None:
            printed = io.StringIO()
            with redirect_stdout(printed):
                import_module("benchmarks.__main__").main()
            assert "python -m benchmarks.step_cost" in printed.getvalue()

        return Step(Way.RUN, what, listing)
    assert module.startswith("benchmarks."), what

    def parse() -> None:
        import_module(f"{module}.__main__").parse(arguments)

    if module in OF_MAKE_BENCH and not arguments:
        return run_by(what, *TARGETS["bench"])
    return Step(Way.PARSED, what, parse, why="a benchmark of minutes; tests/benchmarks runs the parts of it")


SCRIPTS = {
    "docs/generate.py": ("tests/docs/test_documentation.py", "generate.main("),
    "docs/dashboards/render.py": ("tests/docs/test_dashboards.py", "def test_a_real_prometheus_answers_every_panel("),
}
SHORTER_SCRIPTS = {"patches/check.py": ("--fast",)}
MODULES = {
    "dev.release_notes": ("tests/dev/test_release_notes.py", 'main(["Unreleased"])'),
    "hatchling": ("tests/dev/test_release.py", '"-m", "hatchling", "build"'),
}


def make(call: Call, place: Place) -> Step:
    """Targets exist; continuous integration runs most of them."""
    (target,) = call.arguments
    what = str(call)
    if target in TARGETS:
        return run_by(what, *TARGETS[target])

    def exists() -> None:
        done = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    return Step(Way.PARSED, what, exists, why="it takes longer than all tests, or needs an environment of its own")


TARGETS = {
    "check": (".github/workflows/ci.yml", "run: make check"),
    "test": (".github/workflows/ci.yml", "run: make test\n"),
    "test-cuda": (".github/workflows/ci.yml", "run: make test-cuda\n"),
    "test-long": ("tests/dev/test_targets.py", 'make("test-long", '),
    "bench": ("tests/dev/test_targets.py", "def test_make_bench("),
    "lint": ("dev/test.py", 'beside=("make", "--no-print-directory", "lint")'),
    "docs": ("tests/docs/test_documentation.py", "def test_the_site_builds_strictly_and_is_self_contained("),
    "serve": ("tests/docs/test_code_blocks.py", "def test_make_serve("),
}
OF_MAKE_BENCH = ("benchmarks.step_cost", "benchmarks.realtime", "benchmarks.overhead")


def pip(call: Call, place: Place) -> Step:
    """Check that this environment has the packages; other tests build and install this one."""
    command, *what = call.arguments
    assert command == "install", call
    if what[-1] == "vllm-omni-sched":
        return run_by(str(call), "tests/dev/test_release.py", "def test_pip_builds_the_package_from_an_index_as_")
    if re.fullmatch(r"\.(\[\w+\])?", what[0]):
        extras = re.findall(r"\[(\w+)\]", what[0])

        def known() -> None:
            import tomllib

            project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
            assert set(extras) <= set(project["optional-dependencies"])

        step = run_by(str(call), "tests/dev/test_release.py", '"install", "--no-index", "--no-deps"')
        there, step.act = step.act, lambda: (known(), there())[0]
        return step

    def satisfied() -> None:
        command = [sys.executable, "-m", "pip", "install", "--no-index", "--dry-run", *what]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    return Step(Way.RUN, str(call), satisfied)


def curl(call: Call, place: Place) -> Step:
    """Bash has run the rest of the block over our metrics, as a server has them at this address."""

    assert place.here(call.arguments[-1]) == f"{place.server}/metrics", call
    return Step(Way.RUN, str(call))


def git(call: Call, place: Place) -> Step:
    def run() -> None:
        subprocess.run(["git", *call.arguments], cwd=ROOT, check=True, capture_output=True)

    return Step(Way.RUN, str(call), run)


def promtool(call: Call, place: Place) -> Step:
    return run_by(str(call), "tests/deploy/test_alerts.py", '("test", "alerts_test.yaml")')


def prometheus(call: Call, place: Place) -> Step:
    """Check the configuration; a test runs Prometheus with another one."""
    config = call.arguments[0].removeprefix("--config.file=")
    step = run_by(str(call), "tests/docs/test_dashboards.py", "prometheus(binary(), tmp_path, port)")
    there = step.act

    def run() -> None:
        binary = tool("promtool")
        assert binary is not None, "no promtool: put it on PATH"
        done = subprocess.run([binary, "check", "config", ROOT / config], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        there()

    step.act = run
    return step


def mooncake_master(call: Call, place: Place) -> Step:
    return run_by(str(call), "tests/support/hosts.py", '"mooncake_master"')


def kubectl(call: Call, place: Place) -> Step:
    """Let kubectl do all that needs no cluster: render a kustomization, or print what it would create."""
    command, *what = call.arguments
    if command == "kustomize" or (command == "apply" and what[0] == "-k"):
        arguments = ["kustomize", what[-1]]
    elif command == "create":
        arguments = [*call.arguments, "--dry-run=client", "--output=yaml"]
    else:
        return left("it needs a cluster", call, place)

    def run() -> None:
        binary = tool("kubectl")
        assert binary is not None, "kubectl is not installed: it is in dev/locks/omni.txt"
        done = subprocess.run([binary, *arguments], cwd=place.folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "kind: " in done.stdout

    if command == "apply":
        return Step(Way.LEFT, str(call), run, why="it needs a cluster; kubectl renders what it would apply")
    return Step(Way.RUN, str(call), run)


def left(why: str, call: Call, place: Place) -> Step:
    """Check that the files exist which a command names that cannot be run here."""

    def exist() -> None:
        named = [one.rpartition("=")[2] for one in call.arguments]
        missing = [one for one in named if re.match(r"(deploy|docs)/", one) and not (ROOT / one).exists()]
        assert not missing, f"not in the repository: {missing}"

    return Step(Way.LEFT, str(call), exist, why=why)


BY_PROGRAM: Mapping[str, Callable[[Call, Place], Step]] = {
    "vllm": vllm,
    "vllm-omni-sched": ours,
    "python": python,
    "make": make,
    "pip": pip,
    "curl": curl,
    "git": git,
    "promtool": promtool,
    "prometheus": prometheus,
    "mooncake_master": mooncake_master,
    "docker": partial(left, "it needs a Docker engine; tests/deploy reads the files that it names"),
    "kubectl": kubectl,
}


# ---- data and programs in Python


def steps_of_data(block: Block, place: Place) -> Iterator[Step]:
    """Yield what is done with a block that is no shell.

    Raises:
        KeyError: nothing is known of the language.
    """
    yield BY_LANGUAGE[block.language](block, place)


def python_code(block: Block, place: Place) -> Step:
    if "upstream/" in block.page:
        return run_by(block.text, "tests/patches/test_pull_requests.py", "def test_")

    def check(result: dict[str, Any]) -> None:
        assert all(one["tokens"] == [2, 2] for one in result["answers"]), result

    job = place.job("python", code=block.text, model=str(MODELS / "qwen2-vl"))
    return Step(Way.RUN, block.text, job=job, check=check)


def yaml_data(block: Block, place: Place) -> Step:
    """Options of an engine are loaded; a deploy YAML or options of stages are what doctor reads."""
    import yaml

    from vllm_omni_sched.config.options import OmniSchedConfig
    from vllm_omni_sched.connectors.auto import AutoOptions

    data = yaml.safe_load(block.text)
    if "extra" in data:  # the options of a connector alone
        return Step(Way.READ, block.text, partial(AutoOptions.model_validate, data["extra"]))
    if set(data) <= set(OmniSchedConfig.model_fields) | {"profile", "expert"}:

        def load() -> None:
            file = place.folder / "block.yaml"
            file.write_text(place.here(block.text))
            load_config({"omni_sched": str(file)})

        return Step(Way.READ, block.text, load)
    file = place.folder / "block.yaml"
    file.write_text(block.text)
    arguments = ["doctor", "--stages", str(file)]
    if "stages" in data and "connectors" not in data:
        arguments += ["--model", str(place.model)]

    def connectors() -> None:
        for one in data.get("connectors", {}).values():
            assert one["name"] == "OmniAutoConnector"
            AutoOptions.model_validate(one["extra"])

    def check(result: dict[str, Any]) -> None:
        assert result["status"] == 0, result["said"]

    return Step(Way.READ, block.text, connectors, place.job("doctor", arguments=arguments), check)


def json_data(block: Block, place: Place) -> Step:
    from vllm_omni_sched.sim.workloads.trace import read_trace

    if block.text.startswith('{"omni_sched"'):
        return Step(Way.READ, block.text, lambda: load_config(json.loads(block.text)) and None)

    def read() -> None:
        file = place.folder / "block.jsonl"
        exact = '"kind": "request"' in block.text
        header = {"format": "vllm-omni-sched trace", "version": 1, "interval_seconds": 1.0, "source": "", "begins": ""}
        file.write_text((json.dumps(header) + "\n" if exact else "") + block.text)
        trace = read_trace(file)
        assert len(trace.requests if exact else trace.intervals) == 1

    return Step(Way.READ, block.text, read)


def toml_data(block: Block, place: Place) -> Step:
    """A scenario is read with all of its points; a part of one takes the place of that part in a scenario."""
    from vllm_omni_sched.sim.study.plan import load_study

    def read() -> None:
        base = (place.folder / "pictures.toml").read_text()
        if "tokens_per_frame" in block.text:  # it is about clips
            base = with_part(base, '[workload]\nkind = "video-clips"\nrate = 1.0\n')
        if "video-clips" in base + block.text:
            base = base.replace("[[stages]]", f"{VIDEO_STAGE}[[stages]]", 1)
        file = place.folder / "block.toml"
        file.write_text(block.text if "\nname = " in block.text.split("\n[")[0] else with_part(base, block.text))
        assert load_study(file).points

    return Step(Way.READ, block.text, read)


VIDEO_STAGE = """[[stages]]
name = "video"
kind = "video"
decoders = "cpu"
replicas = 1
per_replica = 8

"""


def with_part(whole: str, part: str) -> str:
    """Return a file of TOML in which a part takes the place of the tables that it has."""
    keys, tables = _tables(whole)
    new_keys, new_tables = _tables(part)
    kept = [(name, text) for name, text in tables if name not in dict(new_tables)]
    return keys + new_keys + "".join(text for _, text in [*kept, *new_tables])


def _tables(text: str) -> tuple[str, list[tuple[str, str]]]:
    """Return the keys before the first table, and the tables, each with the first part of its name."""
    keys, *tables = re.split(r"^(?=\[)", text, flags=re.MULTILINE)
    return keys, [(re.split(r"[\].]", table.lstrip("["), maxsplit=1)[0], table) for table in tables]


def promql(block: Block, place: Place) -> Step:
    """Prometheus evaluates the queries, over metrics that exist."""
    import yaml

    from tests.support.metric_names import all_metrics, base_names

    known = all_metrics()
    queries = [re.sub(r"^#.*$", "", one, flags=re.MULTILINE).strip() for one in block.text.split("\n\n")]

    def evaluate() -> None:
        for query in queries:
            unknown = base_names(query, known) - set(known)
            assert not unknown, f"{query}: there are no metrics {unknown}"
            assert base_names(query, known), f"{query}: it has no metric"
        binary = tool("promtool")
        assert binary is not None, "no promtool: put it on PATH"
        file = place.folder / "queries.yaml"
        tests = [{"expr": query, "eval_time": "1m", "exp_samples": []} for query in queries]
        file.write_text(yaml.safe_dump({"tests": [{"interval": "1m", "promql_expr_test": tests}]}))
        done = subprocess.run([binary, "test", "rules", file], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    return Step(Way.RUN, block.text, evaluate)


BY_LANGUAGE: Mapping[str, Callable[[Block, Place], Step]] = {
    "python": python_code,
    "yaml": yaml_data,
    "json": json_data,
    "toml": toml_data,
    "promql": promql,
}
