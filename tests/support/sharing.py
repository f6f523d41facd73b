"""Group the tests that must run in the same process when several processes share a session (`forked.py`)."""

import re
from functools import cache
from pathlib import Path

PIPELINES = "ran"
SESSION_ENGINES = ("in_process", "in_processes", PIPELINES)
"""Fixtures of the session that start engines."""

_ROOT = Path(__file__).resolve().parents[2]
_GUISE = re.compile(r"\[(?:\w+Mixin-)?([^\]]*?)(?:-tests/[^\]]*)?\]$")


def group_of(test_id: str) -> str:
    """Return the group of a test: the engines of the session that its file uses, or its file.

    vLLM's own tests, which run once for each guise of our classes, are grouped by guise.
    """
    file, _, name = test_id.partition("::")
    guise = _GUISE.search(name)
    if file.startswith("tests/upstream/") and guise is not None:
        return f"{file} {guise[1]}"
    return _engines(file) or file


@cache
def _engines(file: str) -> str | None:
    """Return the first fixture of `SESSION_ENGINES` that a function of the file takes."""
    path = _ROOT / file
    text = path.read_text() if path.is_file() else ""
    return next((name for name in SESSION_ENGINES if re.search(rf"[(,]\s*{name}\s*[:,)]", text)), None)
