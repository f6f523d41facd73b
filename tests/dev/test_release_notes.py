"""The notes of a release have what its section of the changelog has, in the order for operators."""

from __future__ import annotations

import pytest

from dev.release_notes import CHANGELOG, main


def test_the_changelog_makes_notes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_OMNI_SCHED_URL", raising=False)
    assert main(["Unreleased"]) == 0
    printed = capsys.readouterr().out
    section = CHANGELOG.read_text().split("## Unreleased")[1].split("\n## ")[0]
    assert printed.count("\n- ") == section.count("\n- ") > 0
    assert main(["none"]) == 1
    assert capsys.readouterr().err.startswith("release_notes: CHANGELOG.md has no section 'none'")
