"""`vllm-omni-sched explain`: the history of a request in sentences, and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.unit.core.engine.test_explanation import LANE
from vllm_omni_sched.cli import app
from vllm_omni_sched.core.engine.history_lines import HistoryLine, line_of

pytestmark = pytest.mark.once  # nothing here reaches vLLM


@pytest.fixture
def history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLUMNS", "160")
    path = tmp_path / "history.jsonl"
    mine = [HistoryLine(one.at, one.transition, "chatcmpl-1-0a1b2c3d", one.detail) for one in LANE]
    path.with_name("history.jsonl.1").write_bytes(b"".join(map(line_of, mine[:3])))
    others = [HistoryLine(11.0, "entered", f"{number}", "batch") for number in range(9)]
    path.write_bytes(b"".join(map(line_of, [*others, *mine[3:]])))
    return path


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["explain", *map(str, arguments)], catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


def test_a_request_is_explained_from_both_files(history: Path) -> None:
    status, out, error = run("chatcmpl-1", history)
    said = [" ".join(line.split()) for line in out.splitlines()]
    assert (status, error) == (0, "")
    assert said[0].startswith("chatcmpl-1-0a1b2c3d, 1970-01-0")
    assert said[1] == "seconds what happened"
    assert said[2] == "0.000 It entered, as a request of the class interactive."
    assert said[4] == "0.500 It was held back: it waits for 2 items of the lane."
    assert said[-2] == "10.000 It left (stopped)."
    assert said[-1].startswith("It waited 2.500 s for its first token: 1.500 s for items that are encoded in the lane")


def test_json_has_the_waits_and_the_lines(history: Path) -> None:
    status, out, _ = run("chatcmpl-1", history, "--json")
    (found,) = map(json.loads, out.splitlines())
    assert status == 0
    assert found["waits_seconds"] == {"lane": 1.5, "queue": 0.75, "computing": 0.25}
    assert found["entries"][0] == {
        "at": 10.0,
        "transition": "entered",
        "request_id": found["request_id"],
        "detail": "interactive",
    }


@pytest.mark.parametrize(
    ("engine_id", "found"),
    [("r", True), ("r-1234", True), ("0_r-1234", True), ("1_r", True), ("rr", True), ("x_r", False), ("1_xr", False)],
)
def test_the_id_that_clients_know_finds_that_of_the_engine(tmp_path: Path, engine_id: str, found: bool) -> None:
    path = tmp_path / "history.jsonl"
    path.write_bytes(line_of(HistoryLine(1.0, "entered", engine_id, "batch")))
    assert run("r", path)[0] == (0 if found else 1)


def test_an_unknown_request_is_an_error_that_names_others(history: Path) -> None:
    status, out, error = run("nobody", history)
    assert (status, out) == (1, "")
    assert "has no lines of request 'nobody'; the nearest ones are 8, 7, 6, 5, 4" in error
    assert len(error.splitlines()) == 1


def test_a_file_that_is_no_history_is_an_error_that_says_which_one_is(tmp_path: Path) -> None:
    path = tmp_path / "faults.jsonl"
    path.write_text('{"at": 1.0, "kind": "died"}\nnonsense\n')
    status, out, error = run("r", path)
    assert (status, out) == (1, "")
    assert f"{path} is no history of requests: none of its 2 lines is one" in error
    assert "expert.history_path" in error
    path.write_bytes(b"")
    status, _, error = run("r", path)
    assert status == 1
    assert "has no lines of any request yet" in error


def test_skipped_lines_are_counted_also_where_the_request_is_not_found(history: Path) -> None:
    with history.open("ab") as file:
        file.write(b"nonsense\n")
    status, _, error = run("nobody", history)
    assert status == 1
    assert "; skipped lines that are none of a history: 1" in error
