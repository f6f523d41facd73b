"""Print the notes of a release, made of its section of CHANGELOG.md: ``python -m dev.release_notes 0.2.0``.

The notes are for operators: first the supported versions, then what changed for those who upgrade, what is new, and
what was fixed, each as the changelog has it. What docs/releasing.md asks for besides is added by hand.
With the address of the repository in ``VLLM_OMNI_SCHED_URL``, links lead to the files of the release's tag; without it,
they become their texts.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

from hatch_build import ADDRESS, standing_alone
from vllm_omni_sched.compat import SUPPORTED_VERSIONS

CHANGELOG = Path(__file__).parents[1] / "CHANGELOG.md"
PARTS = {
    "Removed": "Before you upgrade: removed",
    "Changed": "Before you upgrade: changed",
    "Deprecated": "Before you upgrade: deprecated",
    "Security": "Security",
    "Added": "New",
    "Fixed": "Fixed",
}
"""Headings of the notes by those of the changelog, in the order of the notes."""
SECTION = re.compile(r"^## (?P<name>\S+)(?: - (?P<date>\S+))?\n(?P<text>.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
PART = re.compile(r"^### (?P<name>[^\n]+)\n(?P<text>.*?)(?=^### |\Z)", re.MULTILINE | re.DOTALL)


class NotesError(Exception):
    """Raised when there are no notes for a version; the message says why."""


def notes_of(changelog: str, version: str, address: str = "") -> str:
    """Return the notes of a version as Markdown; ``Unreleased`` is a version, too. ``address``: of the repository.

    Raises:
        NotesError: the changelog has no such section, or nothing in it, or a heading that the notes have no place for.
    """
    sections = {section["name"]: section for section in SECTION.finditer(changelog)}
    if version not in sections:
        raise NotesError(f"CHANGELOG.md has no section {version!r}; it has {', '.join(sections) or 'none'}")
    parts = {part["name"]: part["text"].strip() for part in PART.finditer(sections[version]["text"])}
    unknown = sorted(set(parts) - set(PARTS))
    if unknown:
        raise NotesError(
            f"section {version!r} of CHANGELOG.md has the heading {unknown[0]!r}; use one of {', '.join(PARTS)}"
        )
    if not any(parts.values()):
        raise NotesError(f"section {version!r} of CHANGELOG.md is empty; write there what changed")
    date = f" ({sections[version]['date']})" if sections[version]["date"] else ""
    supported = ", ".join(one if one.count(".") > 1 else f"{one}.x" for one in SUPPORTED_VERSIONS)
    texts = [
        f"# vllm-omni-sched {version}{date}",
        "## Supported versions",
        f"vLLM {supported}. [Compatibility](docs/compatibility.md) says more.",
        *(f"## {heading}\n\n{parts[name]}" for name, heading in PARTS.items() if parts.get(name)),
    ]
    return standing_alone("\n\n".join(texts) + "\n", address, f"v{version}")


def main(arguments: list[str] | None = None) -> int:
    """Print the notes; the exit status is 1 if there are none."""
    parser = argparse.ArgumentParser(description="Print the notes of a release, made of its section of CHANGELOG.md.")
    parser.add_argument("version", help="as in CHANGELOG.md, such as 0.2.0 or Unreleased")
    version = parser.parse_args(arguments).version
    try:
        notes = notes_of(CHANGELOG.read_text(encoding="utf-8"), version, os.environ.get(ADDRESS, "").rstrip("/"))
    except NotesError as error:
        print(f"release_notes: {error}", file=sys.stderr)
        return 1
    print(notes, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
