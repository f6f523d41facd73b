"""What results and pages claim: revisions exist, and numbers that look measured have a source."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))
claims = importlib.import_module("claims")
sys.path.remove(str(ROOT / "docs"))
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_each_result_is_of_a_commit_of_this_history():
    if reason := claims.why_no_history(RESULTS):
        pytest.skip(reason)
    assert claims.unknown_revisions(RESULTS) == []


def test_a_revision_that_does_not_exist_or_has_changes_is_found_in_any_part_of_a_result(tmp_path):
    def git(*words):
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "--quiet")
    git("commit", "--quiet", "--allow-empty", "--message", "one")
    real = git("rev-parse", "HEAD")[:12]
    false = real[:8] + ("0000" if real[8:] != "0000" else "1111")
    parts = [{"measured": {"revision": real}}, {"measured": {"revision": f"{real}+"}}]
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "a.json").write_text(json.dumps({"provenance": {"revision": false}, "results": parts}))
    (tmp_path / "b.json").write_text(json.dumps({"provenance": {"revision": real}, "results": []}))
    assert claims.why_no_history(tmp_path) is None
    assert [one.split(" is no commit")[0] for one in claims.unknown_revisions(tmp_path)] == [
        f"a.json: its revision {false!r}",
        f"a.json: its revision {real + '+'!r}",
    ]
    page = tmp_path / "page.md"
    page.write_text("It is 3 times as fast.\n")
    assert len(claims.complaints([page], tmp_path)) == 3


def test_without_a_history_revisions_are_not_looked_at(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"provenance": {"revision": "0" * 12}}))
    assert claims.why_no_history(tmp_path) == "this is a copy without a history"
    assert claims.complaints([], tmp_path) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_numbers_that_look_measured_are_generated_or_say_where_they_come_from(page):
    assert claims.unmarked(page.read_text()) == []


@pytest.mark.parametrize(
    "text",
    [
        "Pictures come 0.48x as late.",
        "It is 1.8 times as fast on two devices.",
        "P99 is 0.27 ms.",
        "A step takes 38.7 µs, and 32.4 in stock.",
        "Throughput grows by 12 %.",
        "- one\n- The gain is 3 s\n\nText. <!-- by hand: of another paragraph -->",
    ],
)
def test_a_number_without_a_source_is_found(text):
    assert len(claims.unmarked(text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "The default is 50 ms.",
        "P99 is 0.27 ms. <!-- by hand: one run -->",
        "It is 1.8 times as fast,\nas they say.\n<!-- quoted: their paper -->",
        "`0.5x` of a picture of 448x448 in vLLM 0.33",
        "<!-- generated: gains -->\nIt takes 5 ms.\n<!-- end -->",
        "| a | takes 5 ms |",
        "Seconds. <!-- by hand: one run -->\n\n| a | b | c |\n|---|---|---|\n| 1 | 2 | 3 |\n| 4 | 5 | 6 |\n",
        "```text\nIt takes 5 ms.\n```",
        "# A page\n\n<!-- simulated: this page -->\n\nP50 is 5 ms.\n",
    ],
)
def test_a_number_with_a_source_or_that_nobody_measured_is_left_alone(text):
    assert claims.unmarked(text) == []
