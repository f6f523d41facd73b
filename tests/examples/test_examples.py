"""Each example runs with a tiny model, with the options that its page shows for a real one."""

from __future__ import annotations

import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from dev.child_process import ChildProcess
from examples import chat_with_pictures, realtime_transcription, serving, speech_with_stages, video_questions
from tests.engine.harness.processes import ENVIRONMENT, OUR_PLUGIN, ROOT, WORKER_IN_ENGINE_CORE
from tests.support.warm import WarmPopen
from vllm_omni_sched.config.load import read_options
from vllm_omni_sched.config.stage_options import StageSchedConfig
from vllm_omni_sched.config.stage_yaml import VARIABLE as STAGES_FILE

SERVED = (chat_with_pictures, realtime_transcription, video_questions, speech_with_stages)
METRICS_SECONDS = 60
PAGE = (ROOT / "examples" / "README.md").read_text()


def by_name(module: ModuleType) -> str:
    return module.__name__.rpartition(".")[2]


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let servers begin with vLLM imported, and compute with one thread."""
    monkeypatch.setattr(serving, "start_process", WarmPopen)
    for name, value in (ENVIRONMENT | OUR_PLUGIN | WORKER_IN_ENGINE_CORE).items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[[], list[str]]:
    """Return a function that returns the lines printed since the last call."""
    return lambda: capsys.readouterr().out.splitlines()


def run(example: Any, said: Any, *metrics: tuple[str, Sequence[str], float]) -> list[str]:
    """Run an example against a server that has its options; return its lines.

    ``metrics``: the server must come to count at least so many of each, by name and values of labels.
    """
    with example.SERVING.running(None) as url:
        assert example.SERVING.command() in "\n".join(said())
        example.main(["--url", url])
        lines = said()
        deadline = time.monotonic() + METRICS_SECONDS
        while missing := [one for one in metrics if counted(url, *one[:2]) < one[2]]:
            assert time.monotonic() < deadline, f"not counted: {missing}"
            time.sleep(0.2)
    return lines


def counted(url: str, name: str, values: Sequence[str]) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as page:
        families = text_string_to_metric_families(page.read().decode())
    return sum(
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == f"vllm:omni_sched_{name}" and set(values) <= set(sample.labels.values())
    )


@pytest.mark.engine
def test_chat_with_pictures(warm: None, said: Any) -> None:
    lines = run(chat_with_pictures, said, ("steps_total", (), 64), ("admitted_total", (), 3))
    answers = dict(line.split(": ", 1) for line in lines)
    assert list(answers) == ["the chat that streams", "the pictures", "the batch job"]
    assert all(answer.strip() for answer in answers.values())
    assert answers["the pictures"] != answers["the batch job"]


@pytest.mark.engine
def test_realtime_transcription(warm: None, said: Any) -> None:
    frames = 25  # two seconds
    lines = run(realtime_transcription, said, ("session_updates_total", ("delta",), frames / 2))
    count, _, rest = lines[-1].partition(" ")
    assert rest == "pieces of text for 2.0 s of sound"
    assert int(count) >= frames


@pytest.mark.engine
def test_video_questions(warm: None, said: Any) -> None:
    lines = run(video_questions, said, ("videos_total", ("decoded",), len(video_questions.QUESTIONS)))
    for line, question in zip(lines, video_questions.QUESTIONS, strict=True):
        assert line.startswith(question)
        assert line.removeprefix(question).strip()


@pytest.mark.engine
def test_offline_batch(tmp_path: Path) -> None:
    environment = {**ENVIRONMENT, **OUR_PLUGIN, **WORKER_IN_ENGINE_CORE}
    command = [sys.executable, "-m", "examples.offline_batch"]
    with ChildProcess(command, log=tmp_path / "log", env=environment, start=WarmPopen) as process:
        code = process.wait()
    lines = process.log.read_text().splitlines()
    assert code == 0, "\n".join(lines[-40:])
    answers = [line for line in lines if line.startswith("picture ")]
    assert [answer.split(":")[0] for answer in answers] == ["picture 1", "picture 2", "picture 3"]
    assert all(answer.partition(":")[2].strip() for answer in answers)


def deploy_with_a_file_of_options(folder: Path) -> tuple[Sequence[str], Mapping[str, str]]:
    """Deploy the tiny pipeline by a YAML without options; a variable names the file that has them."""
    options, variables = speech_with_stages.deploy_tiny(folder)
    deploy, file = Path(options[-1]), folder / "stages.yaml"
    content = yaml.safe_load(deploy.read_text())
    file.write_text(yaml.safe_dump(content.pop("omni_sched")))
    deploy.write_text(yaml.safe_dump(content))
    return options, {**variables, STAGES_FILE: str(file)}


@pytest.mark.omni
@pytest.mark.long
@pytest.mark.parametrize(
    "deploy",
    [speech_with_stages.deploy_tiny, deploy_with_a_file_of_options],
    ids=["options in the deploy YAML", "options in a file that a variable names"],
)
def test_speech_with_stages(said: Any, deploy: Callable[[Path], tuple[Sequence[str], Mapping[str, str]]]) -> None:
    pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")
    serving = replace(speech_with_stages.SERVING, prepare=deploy)
    example = SimpleNamespace(SERVING=serving, main=speech_with_stages.main)
    lines = run(example, said, *(("stage_requests_total", (stage, "finished"), 2) for stage in "012"))
    assert [line.partition("?")[0] + "?" for line in lines] == list(speech_with_stages.QUESTIONS)
    assert lines[0] == lines[1]
    assert all(int(line.split("?")[1].split()[0]) > 44 for line in lines)  # a WAV file with sound behind its header


@pytest.mark.parametrize("example", SERVED, ids=by_name)
def test_the_page_has_the_command_for_a_real_model(example: Any) -> None:
    assert f"\n{example.SERVING.command()}\n" in PAGE
    assert f"| `python -m examples.{by_name(example)}` |" in PAGE


def test_the_options_of_the_stage_scheduler_are_valid() -> None:
    options = read_options(StageSchedConfig, yaml.safe_load(speech_with_stages.OPTIONS.read_text()))
    assert options.runtime.recovery.max_restarts == 3


def test_a_server_that_does_not_start_is_an_error_with_its_last_lines(tmp_path: Path) -> None:
    broken = serving.Serving(
        "real", (), lambda: tmp_path, program=(sys.executable, "-c", "raise SystemExit('no luck')")
    )
    with pytest.raises(RuntimeError, match="the server did not start:\nno luck"), broken.running(None):
        pass


def test_sound_in_another_form_is_refused_with_the_remedy(tmp_path: Path) -> None:
    import wave

    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(44_100)
        file.writeframes(bytes(8))
    with pytest.raises(SystemExit, match="must be mono, with 16-bit samples at 16000 Hz: convert it"):
        realtime_transcription.read(tmp_path / "a.wav")
