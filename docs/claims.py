"""Checks what pages and results claim: each revision is a commit, and each number that looks measured has a source.

`docs/generate.py --check` runs both.
"""

import json
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

UNIT = r"(?:ms|µs|us|s|seconds?|minutes?|%|percent|[KMG]B/s|tokens/s|images/s|requests/s|frames/s)"
QUANTITY = re.compile(rf"(?<![\w.,-])\d[\d.,]*(?: (?:to|and) \d[\d.,]*)?\s?{UNIT}(?!\w)")
COMPARED = re.compile(
    r"\b(?:took|takes?|measured|stock|faster|slower|longer|shorter|sooner|later|in place of|instead of|against|gain\w*|"
    r"P50|P90|P99|medians?|throughput)\b",
    re.IGNORECASE,
)
RATIO = re.compile(r"(?<![\w.,-])\d[\d.,]*(?:x(?!\w)| times (?:as|that|the|longer|slower|faster))")
MARK = re.compile(r"<!-- (?:by hand|quoted|by design|simulated)(?::[^>]*)? -->")
"""Says of the numbers of a paragraph, or with ``this page`` of all on it, that no result file has them, and why."""
ADVICE = (
    "generate this number from a result file, leave it out, or end its paragraph (of a table, the one before it) with "
    "<!-- by hand: where it comes from -->, <!-- quoted: from where -->, <!-- simulated --> or, of defaults and goals, "
    "<!-- by design -->"
)
GENERATED = re.compile(r"<!-- generated: [a-z0-9-]+ -->\n.*?<!-- end -->", re.DOTALL)
CODE = re.compile(r"```.*?```|`[^`\n]*`|\]\([^)]*\)", re.DOTALL)
ITEM = re.compile(r"\n(?=\s*(?:[-*]|\d+\.) )")
NUMBERS = re.compile(r"\|\s*[−+-]?\d[\d.,]*\s*(?=\|)")
MOST_NUMBERS = 6
"""Numbers from which on a table that was not generated looks like results."""


def unmarked(text: str) -> list[str]:
    """Return the sentences and tables of a page with numbers that look measured and have no source.

    The mark of a table is in the paragraph before it.
    """
    text = GENERATED.sub("", text)
    if "<!-- simulated: this page -->" in text:
        return []
    found, before = [], ""
    for block in re.split(r"\n\s*\n", CODE.sub(" ", text)):
        if block.startswith("|"):
            if len(NUMBERS.findall(block)) >= MOST_NUMBERS and not MARK.search(before):
                found.append(block.partition("\n")[0])
        else:
            found += [sentence for item in ITEM.split(block) if not MARK.search(item) for sentence in _measured(item)]
        before = block
    return found


def _measured(text: str) -> Iterator[str]:
    for sentence in re.split(r"(?<=[.:;]) ", " ".join(text.split())):
        if RATIO.search(sentence) or (QUANTITY.search(sentence) and COMPARED.search(sentence)):
            yield sentence


def unknown_revisions(results: Path) -> list[str]:
    """Return what is wrong with the revisions of the results: all have to be commits of this history."""
    known = commits(results)
    return [
        f"{path.name}: its revision {revision!r} is no commit of this history; measure at one that is in it"
        for path in sorted(results.rglob("*.json"))
        for revision in revisions(json.loads(path.read_text()))
        if revision[:12] not in known or len(revision) != 12
    ]


def why_no_history(folder: Path) -> str | None:
    """Return why there is no whole history here: a copy without git, or a shallow clone."""
    try:
        shallow = _git(folder, "rev-parse", "--is-shallow-repository")
    except (OSError, subprocess.CalledProcessError):
        return "this is a copy without a history"
    return "this is a shallow clone" if shallow == "true" else None


def commits(folder: Path) -> set[str]:
    """Return the first 12 digits of all commits that HEAD has behind it."""
    return {line[:12] for line in _git(folder, "rev-list", "HEAD").split()}


def revisions(record: Any) -> Iterator[str]:
    """Yield all revisions in a result, however deep."""
    if isinstance(record, dict):
        if isinstance(record.get("revision"), str):
            yield record["revision"]
        record = list(record.values())
    for inner in record if isinstance(record, list) else ():
        yield from revisions(inner)


def complaints(pages: Sequence[Path], results: Path) -> list[str]:
    """Return all that is wrong; without a history, revisions are not looked at."""
    wrong = [] if why_no_history(results) else unknown_revisions(results)
    for page in pages:
        wrong += [f"{page.name}: {sentence!r}: {ADVICE}" for sentence in unmarked(page.read_text())]
    return wrong


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True
    ).stdout.strip()
