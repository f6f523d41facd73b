"""The code blocks of the documents, and the programs that a block of shell runs."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "examples" / "README.md",
    ROOT / "benchmarks" / "README.md",
)
SHELL = ("bash", "console")
NOT_FOUND = "not found: "


@dataclass(frozen=True)
class Block:
    """A fenced block of code; ``line`` is that of its fence, from 1."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(text: str, page: str) -> Iterator[Block]:
    """Yield the blocks of code of a page, in order; an indented block has no language."""
    markdown = MarkdownIt("commonmark").disable("inline")
    for token in markdown.parse(text):
        if token.type in ("fence", "code_block"):
            assert token.map is not None
            yield Block(page, token.map[0] + 1, token.info.strip(), token.content)


def all_blocks() -> list[Block]:
    """Return the blocks of all documents."""
    return [block for page in PAGES for block in blocks_of(page.read_text(), str(page.relative_to(ROOT)))]


@dataclass(frozen=True)
class Call:
    """A program that a block runs, with its arguments and with the variables that the block sets for it."""

    program: str
    arguments: tuple[str, ...]
    variables: Mapping[str, str]

    def __str__(self) -> str:
        return shlex.join(
            [*(f"{name}={value}" for name, value in self.variables.items()), self.program, *self.arguments]
        )


PROGRAM = """#!{bash}
program=${{0##*/}}
if [ "$program" = python ] && [ "$1" = -c ]; then exec {python} "$@"; fi
file="$CALLS/$$"
printf '%s\\0' "$program" "$@" > "$file.arguments"
for name in ${{!VLLM_*}} CC; do
    if [ -n "${{!name}}" ]; then printf '%s=%s\\0' "$name" "${{!name}}"; fi
done > "$file.variables"
echo "$$" >> "$CALLS/order"
if [ -f "$CALLS/$program.prints" ]; then cat "$CALLS/$program.prints"; fi
"""
"""Stands in for a program: notes how it was called. Only ``python -c`` is run: what it prints is part of a command."""

BEGIN = f'command_not_found_handle() {{ echo "{NOT_FOUND}$1" >&2; exit 127; }}\nset -e -o pipefail\n'
TOOLS = ("cp", "grep", "cat")  # what a block may really run, beside what bash has itself


def calls_of(script: str, folder: Path, programs: Sequence[str], prints: Mapping[str, str]) -> list[Call]:
    """Let bash read a block in a folder, with stand-ins for the programs; return what it calls, in order.

    Args:
        prints: what a stand-in prints, by its program.

    Raises:
        AssertionError: a command failed, or is none of the programs; the message has what bash said.
    """
    bash, stand_ins, noted = shutil.which("bash"), folder / ".programs", folder / ".calls"
    assert bash is not None
    for made in (stand_ins, noted):
        made.mkdir()
    text = PROGRAM.format(bash=bash, python=sys.executable)
    for name in programs:
        file = stand_ins / name
        file.write_text(text)
        file.chmod(0o700)
    for name, printed in prints.items():
        (noted / f"{name}.prints").write_text(printed)
    for name in TOOLS:
        (stand_ins / name).symlink_to(shutil.which(name) or f"/bin/{name}")
    (folder / ".venv").mkdir()
    (folder / ".venv" / "bin").symlink_to(stand_ins)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_") and name != "CC"}
    done = subprocess.run(
        [bash, "--noprofile", "--norc", "-c", f"{BEGIN}{script}\nwait\n"],
        cwd=folder,
        env={**kept, "PATH": str(stand_ins), "CALLS": str(noted)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), f"{script}\n{done.stderr}"
    order = noted / "order"
    return [_read(noted / name) for name in (order.read_text().split() if order.exists() else ())]


def _read(file: Path) -> Call:
    program, *arguments = file.with_suffix(".arguments").read_text().split("\0")[:-1]
    variables = dict(line.split("=", 1) for line in file.with_suffix(".variables").read_text().split("\0")[:-1])
    return Call(program, tuple(arguments), variables)
