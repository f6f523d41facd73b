"""Check the linter of the prose: what it reads, what it finds, and that the repository passes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from proselint.checks import __register__ as checks

from dev import prose

ROOT = Path(__file__).resolve().parents[2]


def said(text: str, *, markdown: bool = True) -> list[tuple[int, str, str]]:
    return [(one.line, one.name, one.text) for one in prose.findings(text, markdown=markdown)]


@pytest.mark.slow
def test_the_repository_passes() -> None:
    done = subprocess.run([sys.executable, "-m", "dev.prose"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("text", "name", "found"),
    [
        ("This is obviously right.", "filler", "obviously"),
        ("Please note that it waits.", "filler", "Please note that"),
        ("A very long wait.", "filler", "very"),
        ("It stops in\norder to restart.", "long", "in order to"),
        ("Pictures, e.g. of cats.", "short", "e.g."),
        ("Requests who wait.", "voice", "Requests who"),
        ("It is lost for ever.", "archaism", "for ever"),
        ("It waits for for the lane.", "lexical_illusions", "for for"),
    ],
)
def test_what_should_be_written_otherwise_is_found_in_its_line(text: str, name: str, found: str) -> None:
    assert (3, name, found) in said(f"# Title\n\n{text}\n")


@pytest.mark.parametrize(
    "text",
    [
        "`very very`",
        "```bash\nobviously obviously\n```",
        "<!-- generated: table -->\nvery\n<!-- end -->",
        "[here](very/very.md)",
        "https://example.org/very/very",
        "# Options\n\nOptions are read once.",
    ],
)
def test_code_addresses_and_generated_parts_are_not_read(text: str) -> None:
    assert said(f"Before.\n\n{text}\n\nAfter.\n") == []


def test_a_sentence_may_be_long_in_a_table_alone() -> None:
    words = " ".join(["word" + chr(97 + at % 26) for at in range(prose.LONGEST_SENTENCE + 1)])
    assert [name for _, name, _ in said(f"{words}.\n")] == ["sentence"]
    assert said(f"| {words} | it |\n") == []
    half = words[: len(words) // 2]
    assert said(f"{half}. {half}.\n\n- {half}\n- {half}\n") == []


def test_texts_of_a_program_are_read_and_its_code_is_not() -> None:
    program = (
        '"""Do it.\n\nIt is very quick."""\n\n'
        'very = 1  # a very good number\nprint(f"it takes very long: {very}")\nprint("not very", very)\n'
    )
    assert said(program, markdown=False) == [(3, "filler", "very"), (5, "filler", "very"), (6, "filler", "very")]


def test_every_check_that_is_off_exists_and_has_a_reason() -> None:
    for name, reason in prose.OFF.items():
        assert any(check.matches_partial(name) for check in checks), name
        assert len(reason.split()) > 3
    assert len(prose.enabled()) > 90
