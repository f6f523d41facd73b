"""The notes of a release have what its section of the changelog has, in the order for operators."""

from __future__ import annotations

import re

import pytest

from dev.release_notes import CHANGELOG, NotesError, main, notes_of
from vllm_omni_sched.compat import SUPPORTED_VERSIONS

TEXT = """# Changelog

## Unreleased

## 0.2.0 - 2026-12-01

### Added

- One thing, with a
  second line.
- Another, see [Video](docs/video.md#use).

### Fixed

- An error.

### Changed

- An option.

## 0.1.0 - 2026-11-01

### Added

- Everything.
"""


def test_the_parts_of_the_section_are_in_the_order_of_the_notes() -> None:
    notes = notes_of(TEXT, "0.2.0")
    assert notes.startswith("# vllm-omni-sched 0.2.0 (2026-12-01)\n")
    assert re.findall(r"^## (.+)$", notes, re.MULTILINE) == [
        "Supported versions",
        "Before you upgrade: changed",
        "New",
        "Fixed",
    ]
    assert "## New\n\n- One thing, with a\n  second line.\n- Another, see Video.\n\n## Fixed" in notes
    assert SUPPORTED_VERSIONS[0] in notes
    assert "Everything" not in notes


@pytest.mark.parametrize(
    ("text", "version", "says"),
    [
        (TEXT, "0.3.0", "no section '0.3.0'; it has Unreleased, 0.2.0, 0.1.0"),
        (TEXT, "Unreleased", "section 'Unreleased' of CHANGELOG.md is empty"),
        (TEXT.replace("### Fixed", "### Mended"), "0.2.0", "the heading 'Mended'; use one of Removed, Changed"),
    ],
)
def test_a_section_that_makes_no_notes_is_an_error(text: str, version: str, says: str) -> None:
    with pytest.raises(NotesError, match=re.escape(says)):
        notes_of(text, version)


def test_links_lead_to_the_files_of_the_tag() -> None:
    notes = notes_of(TEXT, "0.2.0", "https://git.example.com/ours")
    assert "- Another, see [Video](https://git.example.com/ours/blob/v0.2.0/docs/video.md#use).\n" in notes


def test_the_changelog_makes_notes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_OMNI_SCHED_URL", raising=False)
    assert main(["Unreleased"]) == 0
    printed = capsys.readouterr().out
    section = CHANGELOG.read_text().split("## Unreleased")[1].split("\n## ")[0]
    assert printed.count("\n- ") == section.count("\n- ") > 0
    assert main(["none"]) == 1
    assert capsys.readouterr().err.startswith("release_notes: CHANGELOG.md has no section 'none'")
