"""`vllm-omni-sched faults`: the journal of faults as a table, filtered, and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_omni_sched.cli import app
from vllm_omni_sched.cli import faults as module
from vllm_omni_sched.monitor.journal.fault import Fault, line_of

pytestmark = pytest.mark.once  # nothing here reaches vLLM

NOW = 1_700_000_000.0
ENTRIES = [
    Fault(NOW - 9000, "started", cause="process 1"),
    Fault(NOW - 8000, "died", 1, "talker", 0, requests=3, cause="exit code -9"),
    *(Fault(NOW - 8000, "redispatched", 1, "talker", 1, requests=2, request_id=f"r{at}") for at in range(3)),
    Fault(NOW - 100, "back", 1, "talker", 0, requests=3, seconds=12.345),
    Fault(NOW - 50, "memory_leak", 0, "thinker", -1, evidence={"rate": 1234.5}, cause="thinker (0) replica 0"),
    Fault(NOW - 10, "failed", 2, "vocoder", requests=1, request_id="x", cause="it has no replica (no_replica)"),
]


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "wall_seconds", lambda: NOW)
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "faults.jsonl"
    path.with_name("faults.jsonl.1").write_bytes(b"".join(map(line_of, ENTRIES[:4])))
    path.write_bytes(b"".join(map(line_of, ENTRIES[4:])))
    return path


def run(*arguments: object) -> tuple[int, list[str], str]:
    result = CliRunner().invoke(app, ["faults", *map(str, arguments)], catch_exceptions=False)
    return result.exit_code, [" ".join(line.split()) for line in result.stdout.splitlines()], result.stderr


def test_entries_of_both_files_are_a_table_oldest_first(journal: Path) -> None:
    status, said, _ = run(journal)
    assert status == 0
    head, *rows, summary = said
    assert head == "time fault stage replica requests seconds cause"
    assert [row.split(" ", 2)[2] for row in rows] == [
        "started process 1",
        "died talker (1) 0 3 exit code -9",
        "redispatched ×3 talker (1) 1 6",
        "back talker (1) 0 3 12.3",
        "memory_leak thinker (0) thinker (0) replica 0; rate 1234",
        "failed vocoder (2) 1 it has no replica (no_replica); request x",
    ]
    assert summary.startswith("8 entries: 3 redispatched, ")
    assert summary.endswith("Requests: 6 ran again, 1 failed.")


@pytest.mark.parametrize(
    ("arguments", "kinds"),
    [
        (["--since", "1min"], ["memory_leak", "failed"]),
        (["--since", "2h"], ["back", "memory_leak", "failed"]),
        (["--since", "7d"], [one.kind for one in ENTRIES]),
        (["--stage", "talker"], ["died", *["redispatched"] * 3, "back"]),
        (["--stage", "2"], ["failed"]),
        (["--since", "2h", "--stage", "talker"], ["back"]),
    ],
)
def test_entries_are_filtered_and_are_json(journal: Path, arguments: list[str], kinds: list[str]) -> None:
    status, said, _ = run(journal, "--json", *arguments)
    assert status == 0
    assert [json.loads(line)["kind"] for line in said] == kinds


def test_lines_that_are_no_entries_are_skipped_and_counted(journal: Path) -> None:
    journal.write_bytes(b'{"at"\n\n' + line_of(ENTRIES[-1]) + b"\xff\n")
    status, said, errors = run(journal, "--json")
    assert status == 0
    assert len(said) == 5
    assert "2 lines are no entries, and were skipped" in errors


def test_a_file_that_is_no_journal_is_an_error_that_says_which_one_is(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text('{"at": 1.0, "transition": "entered"}\nnonsense\n')
    status, said, errors = run(path, "--since", "2h")
    assert (status, said) == (1, [])
    assert f"{path} is no journal of faults: none of its 2 lines is an entry" in errors
    assert "monitoring.journal.path" in errors


def test_what_cannot_be_is_an_error(tmp_path: Path, journal: Path) -> None:
    status, _, errors = run(tmp_path / "none.jsonl")
    assert (status, errors) == (
        1,
        f"vllm-omni-sched faults: {tmp_path / 'none.jsonl'} cannot be read: No such file or directory\n",
    )
    status, _, errors = run(journal, "--since", "yesterday")
    assert status == 2
    assert "--since: 'yesterday' is not a duration" in errors
    status, _, errors = run(journal, "--stage", "talkr")
    assert status == 0
    assert "no entries of stage 'talkr'; there are entries of talker, thinker, vocoder" in errors
