"""Every block of code in the documents is run, or read by the code that it is for; the rest is listed with a reason.

Bash reads the blocks of shell, with stand-ins for programs, which note how they are called (`documents.py` of
`tests/support`). `document_steps.py` says what is done with each program and each kind of data. What needs vLLM is done
by one process with engines of a tiny model (`document_program.py`).
"""

from __future__ import annotations

import json
import re
import shutil
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest

import dev.serve
from dev.child_process import ChildProcess
from tests.engine.harness.processes import (
    ENVIRONMENT,
    IN_PROCESS,
    OUR_PLUGIN,
    WORKER_IN_ENGINE_CORE,
    run_program,
    write_model,
)
from tests.support.clips import encode
from tests.support.document_steps import EXECUTED, MODELS, PROGRAMS, Place, Step, Way, steps_of_call, steps_of_data
from tests.support.documents import ROOT, SHELL, Block, all_blocks, blocks_of, calls_of
from tests.support.vllm_page import page
from tests.support.warm import WarmPopen
from tests.unit.cli.test_faults import ENTRIES
from tests.unit.core.engine.test_explanation import LANE
from tests.unit.monitor.test_server_page import metrics
from tests.unit.sim.workloads.test_importers import FILES
from vllm_omni_sched.core.engine.history_lines import HistoryLine
from vllm_omni_sched.core.engine.history_lines import line_of as history_line
from vllm_omni_sched.monitor.exposition import render
from vllm_omni_sched.monitor.journal.fault import line_of as fault_line
from vllm_omni_sched.sim.workloads.importers import TraceFormat

BLOCKS = [block for block in all_blocks() if block.language != "text"]
SHARE_EXECUTED = 0.95  # of all blocks, those that cannot run here among them
BENCHMARKS = "benchmarks/README.md"
NAME = re.compile(r"[\w./-]+\.yaml")
OF_OTHERS = ("Mooncake",)
"""Folders that a reader has downloaded."""
NEVER = {Way.LEFT: 4, Way.PARSED: 0}
"""Most blocks outside of the page of benchmarks that may have a command that is not run: a new one needs a reason."""
PRINTS = {"curl": render(metrics(1)).decode()}
each_block = pytest.mark.parametrize("block", BLOCKS, ids=str)


@contextmanager
def metrics_page() -> Iterator[str]:
    """Yield the address of a server that has the metrics of vLLM and ours."""

    class Handler(BaseHTTPRequestHandler):
        looks = 0

        def do_GET(self) -> None:
            Handler.looks += 1
            finished = 2 * Handler.looks
            vllm = page(finished={"stop": finished}, prompts=[40] * finished, outputs=[7] * finished, running=1)
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(vllm.encode() + render(metrics(1)))

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of the files that documents name: those that they show, and some that a reader would have."""
    folder = tmp_path_factory.mktemp("documents")
    for block in BLOCKS:
        if (name := named(block)) is not None and not (folder / name).exists():
            (folder / name).write_text(block.text)
    (folder / "deploy.yaml").write_text(deploy_yaml())
    shutil.copy(ROOT / "docs" / "examples" / "stages.yaml", folder / "stages.yaml")
    pictures = (folder / "pictures.toml").read_text()
    assert "\nduration_seconds = 600.0\nwarm_up_seconds = 60.0\n" in pictures
    (folder / "scenario.toml").write_text(pictures.replace("= 600.0\n", "= 20.0\n").replace("= 60.0\n", "= 5.0\n"))
    traces = folder / "Mooncake" / "FAST25-release" / "traces"
    traces.mkdir(parents=True)
    (traces / "conversation_trace.jsonl").write_text(conversations())
    (folder / "conversation_trace.jsonl").write_text(conversations())
    azure = FILES[TraceFormat.AZURE].splitlines()
    (folder / "AzureLMMInferenceTrace_multimodal.csv").write_text(
        "\n".join(f"{line},{more}" for line, more in zip(azure, ("NumImages", 1, 0), strict=True)) + "\n"
    )
    (folder / "history.jsonl").write_bytes(
        b"".join(history_line(HistoryLine(one.at, one.transition, "chatcmpl-9f2c", one.detail)) for one in LANE)
    )
    (folder / "faults.jsonl").write_bytes(b"".join(map(fault_line, ENTRIES)))
    (folder / "clip.mp4").write_bytes(encode(frames=40))
    (folder / "trace.jsonl").write_text(trace())
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(
        json.dumps({"model_type": "qwen3_omni_moe", "architectures": ["Qwen3OmniMoeForConditionalGeneration"]})
    )
    return folder


def named(block: Block) -> str | None:
    """Return the name of the file that a block shows: a comment in its first line that begins with it."""
    first = block.text.splitlines()[0]
    word = first.removeprefix("# ").split(",")[0].split()[0] if first.startswith("# ") else ""
    return Path(word).name if word.endswith((".yaml", ".toml")) else None


def deploy_yaml() -> str:
    """Return the deploy YAML of Qwen3-Omni with our scheduler, as the recipe for it has it."""
    spec = find_spec("vllm_omni")
    assert spec is not None
    (folder,) = spec.submodule_search_locations or ()
    return (Path(folder) / "deploy" / "qwen3_omni_moe.yaml").read_text() + "\nomni_sched: {}\n"


def conversations() -> str:
    """Return a trace of some requests in Mooncake's format, which share the first of their two blocks."""
    one = {"input_length": 655, "output_length": 52}
    lines = ({"timestamp": 500 * at, **one, "hash_ids": [0, at + 1]} for at in range(24))
    return "".join(json.dumps(line) + "\n" for line in lines)


def trace() -> str:
    """Return a trace of some requests, as `vllm-omni-sched import` would write it."""
    header = {"format": "vllm-omni-sched trace", "version": 1, "interval_seconds": 1.0, "source": "", "begins": ""}
    one = {"kind": "request", "text_tokens": 40, "output_tokens": 12, "items": [["image", 256]]}
    return "".join(json.dumps(line) + "\n" for line in [header, *({**one, "at": at / 2} for at in range(12))])


@pytest.fixture(scope="module")
def steps(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Block, list[Step]]:
    """Run all blocks: what this process can do first, and the rest in one process with engines."""
    write_model("qwen2-vl", MODELS / "qwen2-vl")
    found: dict[Block, list[Step]] = {}
    with metrics_page() as server:
        for block in BLOCKS:
            found[block] = taken(block, place_of(block, shared, server, tmp_path_factory))
        for step in (step for each in found.values() for step in each):
            attempt(step, step.act)
        jobs = [step for each in found.values() for step in each if step.job is not None]
        file = shared / "jobs.json"
        different = {key(step): step.job for step in jobs}
        file.write_text(json.dumps([*different.values()]))
        results = run_program(
            "tests.support.document_program",
            file,
            environment={**OUR_PLUGIN, **IN_PROCESS},
            log=shared / "program.log",
        )
        by_key = dict(zip(different, results, strict=True))
        for step in jobs:
            attempt(step, partial(judge, step, by_key[key(step)]))
    return found


def key(step: Step) -> str:
    """Return what two jobs have in common that are the same: engines with equal options are started once."""
    assert step.job is not None
    job = dict(step.job)
    folder = Path(job.pop("folder"))
    if job["kind"] == "serve":
        job["arguments"] = ["serve", *job["arguments"][2:]]  # whichever model
    if job["kind"] == "python":
        return json.dumps(job)
    files = [folder / one for one in NAME.findall(json.dumps(job["arguments"]))]
    job["arguments"] = [one.replace(str(folder), "") for one in job["arguments"]]
    return json.dumps([job, *(file.read_text() for file in files)])


def judge(step: Step, result: dict[str, object]) -> None:
    assert "error" not in result, result["error"]
    step.check(result)


def attempt(step: Step, act: Callable[[], None]) -> None:
    """Do a part of a step; what goes wrong is kept for the test of its block."""
    try:
        act()
    except (Exception, SystemExit):  # noqa: BLE001  whatever it is, the test shows it
        step.wrong.append(f"{step.what}\n{traceback.format_exc()}")


def place_of(block: Block, shared: Path, server: str, factory: pytest.TempPathFactory) -> Place:
    """Make the folder in which a block runs."""
    folder = factory.mktemp("block")
    for file in shared.iterdir():
        if file.is_file() or file.name in OF_OTHERS:
            (folder / file.name).symlink_to(file)
    for other in blocks_of((ROOT / block.page).read_text(), block.page):
        if (name := named(other)) is not None and other.language == "yaml":
            (folder / name).unlink(missing_ok=True)
            (folder / name).write_text(other.text)  # the one that this page shows
    for name in ("docs", "deploy", "examples", "patches"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "benchmarks").mkdir()
    (folder / "benchmarks" / "studies").symlink_to(ROOT / "benchmarks" / "studies")
    named_files = {
        "/etc/omni_sched.yaml": folder / "omni_sched.yaml",
        "/var/log/omni/history.jsonl": folder / "history.jsonl",
        "/var/log/omni/faults.jsonl": folder / "faults.jsonl",
    }
    return Place(folder, server, named_files, shared / "model", shared / "clip.mp4")


def taken(block: Block, place: Place) -> list[Step]:
    """Return what is done with a block; a block for which nothing is known has a step that is wrong."""
    try:
        if block.language in SHELL:
            for name in ("deploy.yaml", "omni_sched.yaml", "options.yaml"):
                if f"cp examples/{name}" in block.text or f" {name}\necho" in block.text or f">> {name}" in block.text:
                    (place.folder / name).unlink(missing_ok=True)  # the block makes it
            found = [steps_of_call(call, place) for call in calls_of(block.text, place.folder, PROGRAMS, PRINTS)]
        else:
            found = list(steps_of_data(block, place))
    except Exception:  # noqa: BLE001  the test of the block shows it
        return [Step(Way.LEFT, str(block), wrong=[traceback.format_exc()])]
    return found


@pytest.mark.engine
@each_block
def test_a_block_works(steps: dict[Block, list[Step]], block: Block) -> None:
    wrong = [said for step in steps[block] for said in step.wrong]
    assert not wrong, f"{block}\n" + "\n".join(wrong)
    assert steps[block], "nothing is done with it"
    assert all(step.why for step in steps[block] if step.way not in (Way.RUN, Way.READ))


@pytest.mark.engine
def test_nearly_all_blocks_are_executed(steps: dict[Block, list[Step]], capsys: pytest.CaptureFixture[str]) -> None:
    def worst(block: Block) -> Way:
        return max((step.way for step in steps[block]), key=[*Way].index)

    here = {block: worst(block) for block in BLOCKS if block.page != BENCHMARKS}
    counts = Counter(here.values())
    executed = sum(counts[way] for way in EXECUTED)
    beside = Counter(worst(block) for block in BLOCKS if block.page == BENCHMARKS)
    with capsys.disabled():
        print(f"\n{len(here)} blocks of code, {executed / len(here):.1%} of them executed: {told(counts)}")
        print(f"{beside.total()} blocks of {BENCHMARKS}: {told(beside)}")
        for block in here:
            for step in steps[block]:
                if step.way not in EXECUTED:
                    print(f"  {block}: {step.what}: {step.way.value}, because {step.why}")
    assert all(counts[way] <= most for way, most in NEVER.items())
    assert executed >= SHARE_EXECUTED * len(here)


def told(counts: Counter[Way]) -> str:
    return ", ".join(f"{counts[way]} {way.value}" for way in Way if counts[way])


@pytest.mark.parametrize(
    ("language", "text", "says"),
    [
        ("ruby", "puts 1", "KeyError: 'ruby'"),
        ("bash", "frobnicate --now", "not found: frobnicate"),
        ("bash", "make bensh", "No rule to make target 'bensh'"),
        ("bash", "kubectl apply -k deploy/kubernetes/tpu", "deploy/kubernetes/tpu"),
        ("bash", "python -m benchmarks.step_cost --sizzes 1", "SystemExit: 2"),
        ("bash", "vllm-omni-sched top --onec localhost:8000", "No such option"),
        ("bash", 'vllm serve MODEL --additional-config \'{"omni_sched": "chatt"}\'', "did you mean 'chat'?"),
        (
            "bash",
            "python -m examples.video_answers",
            "tests/examples/test_examples.py has no 'def test_video_answers('",
        ),
        ("yaml", "profile: chatt", "chatt"),
        ("json", '{"omni_sched": {"windoze": 1}}', "windoze"),
        ("promql", "rate(vllm:omni_sched_stepz_total[5m])", "vllm:omni_sched_stepz_total"),
    ],
)
def test_a_block_that_is_wrong_or_unknown_fails(tmp_path: Path, language: str, text: str, says: str) -> None:
    place = Place(tmp_path, "127.0.0.1:1", {}, tmp_path, tmp_path)
    steps = taken(Block("page.md", 1, language, text), place)
    for step in steps:
        attempt(step, step.act)
    assert says in "".join(said for step in steps for said in step.wrong)


def test_blocks_are_found_in_lists_and_between_other_text() -> None:
    text = "1. first:\n\n   ```bash\n   make x\n   ```\n\n~~~yaml title=a\na: 1\n~~~\n\n    indented\n"
    found = [(one.line, one.language, one.text) for one in blocks_of(text, "page.md")]
    assert found == [(3, "bash", "make x\n"), (7, "yaml title=a", "a: 1\n"), (11, "", "indented\n")]


def test_every_block_names_its_language() -> None:
    assert [str(block) for block in BLOCKS if not block.language] == []


@pytest.mark.engine
@pytest.mark.long
def test_make_serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The program behind `make serve` starts a server, asks it, finds our metrics, and stops."""
    monkeypatch.setattr(dev.serve, "ChildProcess", partial(ChildProcess, start=WarmPopen))
    monkeypatch.setattr(dev.serve, "LOG", ROOT / ".logs" / f"serve.{tmp_path.name}.log")
    monkeypatch.setenv("ONESHOT", "1")
    monkeypatch.setenv("PROFILE", "chat")
    monkeypatch.delenv("PORT", raising=False)
    for name, value in (ENVIRONMENT | OUR_PLUGIN | WORKER_IN_ENGINE_CORE).items():
        monkeypatch.setenv(name, value)
    assert dev.serve.main() == 0
