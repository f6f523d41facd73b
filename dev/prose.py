"""Check the prose of the repository: `python -m dev.prose [FILE ...]`, without names all that git knows.

proselint reads Markdown, without code, addresses and what `docs/generate.py` writes. `RULES` are for Markdown and for
the docstrings, comments and messages of Python files. `OFF` has the checks of proselint that are left out, with the
reason of each.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from proselint.checks import __register__ as checks
from proselint.config import DEFAULT
from proselint.registry.checks import Check

ROOT = Path(__file__).resolve().parent.parent
OFF = {
    "restricted": "allows only a thousand words; proselint leaves it out as well",
    "typography": "quotes, dots and crosses are straight in code, and in text that is read in a terminal",
    "cliches.misc.gnu_diction": "takes 'as a last resort' for a cliche; an order of attempts has a last one",
    "spelling.consistency": "compares spellings within a file, codespell with a dictionary",
    "misc.capitalization": "takes the names of workloads and of options for days and months",
    "dates_times.dates": "takes ranges of numbers for dates",
    "weasel_words.very": "there is a rule for it below, with another advice",
}
"""Checks of proselint that are left out -> why."""


class Rule(NamedTuple):
    """A rule of this project: a text that matches is reported with the advice."""

    name: str
    pattern: re.Pattern[str]
    advice: str


def _rule(name: str, pattern: str, advice: str) -> Rule:
    return Rule(name, re.compile(pattern.replace(" ", r"\s+"), re.IGNORECASE), advice)


RULES = (
    _rule("filler", r"\bvery\b", "leave it out, or give the number"),
    _rule("filler", r"\b(?:simply|obviously|of course|needless to say|basically|as you know)\b", "leave it out"),
    _rule("long", r"\bin order to\b", "write 'to'"),
    _rule("long", r"\b(?:due to|in view of) the fact that\b", "write 'because'"),
    _rule("long", r"\butili[sz]e[sd]?\b|\bleverag(?:e[sd]?|ing)\b", "write 'use'"),
    _rule("voice", r"\b(?:requests?|items?|jobs?|replicas?|stages?|engines?) who\b", "write 'that'"),
)
"""Rules of this project: patterns, and what to write in their place."""
LONGEST_SENTENCE = 60
"""Words that a sentence may have."""


NAMING = Path(__file__).resolve()
"""The file that names the words which it forbids."""


class Finding(NamedTuple):
    """Something that should be written otherwise."""

    line: int
    name: str
    message: str
    text: str


HIDDEN = re.compile(
    r"<!-- generated: .*?<!-- end -->"  # the generator's rows come from docstrings and results
    r"|<!--.*?-->"
    r"|^(?P<fence> *(?:```|~~~)).*?^(?P=fence)$"
    r"|``.+?``|`[^`]+`"
    r"|\]\([^)\s]*\)|https?://\S+"
    r"|^ *!!! \w+|^---\n.*?^---$|<[^>\n]+>",
    re.DOTALL | re.MULTILINE,
)


def masked_markdown(text: str) -> str:
    """Return the text with all that is no prose crossed out, every line where it was."""

    return HIDDEN.sub(_crossed_out, text)


def _crossed_out(found: re.Match[str]) -> str:
    return re.sub(r"[^\n]", "¶", found[0])


def masked_python(text: str) -> str:
    """Return the comments and strings of a program, every line where it was."""
    lines = [[" "] * len(line) for line in text.splitlines()]
    starts = ("fstring_start", "fstring_middle", "fstring_end")
    kinds = {tokenize.COMMENT, tokenize.STRING, *(getattr(tokenize, name.upper(), -1) for name in starts)}
    source = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in kinds or (token.type == tokenize.STRING and token.string.count(" ") < 3):
            continue
        (first, begin), (last, end) = token.start, token.end
        for number in range(first, last + 1):
            of, line = source[number - 1], lines[number - 1]
            since = begin if number == first else 0
            upto = end if number == last else len(of)
            line[since:upto] = of[since:upto]
            if since:
                line[since - 1] = "¶"  # a text does not go on from the one before
    prose = "\n".join("".join(line) for line in lines)
    return HIDDEN.sub(_crossed_out, prose)


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """Yield each sentence of the paragraphs of a masked Markdown text, with where it begins."""
    for paragraph in re.finditer(r"(?:^(?![|#>]).+\n?)+", text, re.MULTILINE):
        begin = 0
        for end in re.finditer(r"[.!?:;](?=\s|$)|\n *(?:[-*]|\d+\.) |\Z", paragraph[0]):
            yield paragraph.start() + begin, paragraph[0][begin : end.end()]
            begin = end.end()


def enabled() -> list[Check]:
    """Return the checks of proselint that are not off."""
    known = [check for check in checks if any(check.matches_partial(name) for name in DEFAULT["checks"])]
    return [check for check in known if not any(check.matches_partial(name) for name in OFF)]


def findings(text: str, *, markdown: bool) -> list[Finding]:
    """Return what is wrong in a file, in the order of its lines."""
    prose = masked_markdown(text) if markdown else masked_python(text)
    broken = re.sub(r"\n(?=\s*\n)|(?<=\n)\n", "¶", prose)  # no phrase goes on in the next paragraph
    assert len(broken) == len(prose)
    found = []

    def add(begin: int, end: int, name: str, message: str) -> None:
        line = prose.count("\n", 0, begin) + 1
        found.append(Finding(line, name, message, " ".join(prose[begin:end].split())[:60]))

    for check in enabled() if markdown else ():
        for result in check.check_with_flags(broken):
            begin, end = result.span
            add(begin, end, result.check_path, result.message)
    for rule in RULES:
        for match in rule.pattern.finditer(broken):
            add(*match.span(), rule.name, rule.advice)
    if markdown:
        for begin, sentence in sentences(prose):
            words = len(re.findall(r"[\w'-]+", sentence))
            if words > LONGEST_SENTENCE:
                add(begin, begin + 60, "sentence", f"{words} words, more than {LONGEST_SENTENCE}: make two of it")
    return sorted(set(found))


def files() -> list[Path]:
    """Return all Markdown and Python files that git knows."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md", "*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    return [ROOT / name for name in listed if (ROOT / name).is_file()]


def main(arguments: Sequence[str]) -> int:
    count = 0
    for path in [Path(name) for name in arguments] or files():
        if path.suffix not in (".md", ".py") or path.resolve() == NAMING:
            continue
        for found in findings(path.read_text(encoding="utf-8"), markdown=path.suffix == ".md"):
            count += 1
            print(f"{path.resolve().relative_to(ROOT)}:{found.line}: {found.text!r}: {found.message} [{found.name}]")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
