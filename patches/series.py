r"""What a patch says about itself, and the folders of them.

A patch file is a header and a unified diff:

    <one line that says what it does>

    Why: …            the cost or fault, and where it is
    Upstream: …       pull requests and issues, or `not yet proposed`
    Touches: …        the files of the diff, nothing else
    Tests: …          the project's own test files that judge it, run on the patched tree
    Mends: …          `path :: text`: stock code (\n for a new line) that is there as long as the patch is needed
    Remove-when: …    what has to have happened
    Without-it: …     what was measured
    ---
    diff --git a/… b/…

`series` names the patches of a folder in the order they apply. A folder is named after a version of vLLM (`0.32.0`), or
after another project and its version (`vllm-omni-0.30.0`).
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "patches"
PROJECTS = {"vllm": "vLLM", "vllm-omni": "vLLM-Omni"}
FIELDS = ("Why", "Upstream", "Touches", "Tests", "Mends", "Remove-when", "Without-it")


class PatchError(RuntimeError):
    """A patch does not apply, or not exactly where it says."""


def release_of(version: str) -> tuple[str, str]:
    """Return the project and the version that a folder is named after."""
    project, _, number = version.rpartition("-")
    return project or "vllm", number


def title_of(version: str) -> str:
    """Return the title for people, such as `vLLM-Omni 0.30.0`."""
    project, number = release_of(version)
    return f"{PROJECTS[project]} {number}"


def _sort_key(version: str) -> tuple[str, list[int]]:
    project, number = release_of(version)
    return project, [int(part) for part in number.split(".")]


@dataclass(frozen=True)
class Patch:
    path: Path
    subject: str
    fields: dict[str, str]
    diff: str

    @classmethod
    def read(cls, path: Path) -> Patch:
        header, _, diff = path.read_text().partition("\n---\n")
        subject, _, rest = header.partition("\n")
        fields: dict[str, str] = {}
        name = ""
        for line in rest.splitlines():
            if match := re.match(r"([A-Z][a-z]+(?:-[a-z]+)*): ?(.*)", line):
                name = match[1]
                fields[name] = match[2]
            elif name and line.startswith(" "):
                fields[name] += " " + line.strip()
        return cls(path, subject.strip(), {k: v.strip() for k, v in fields.items()}, diff)

    @property
    def name(self) -> str:
        return self.path.name

    def items(self, field: str) -> list[str]:
        return [item.strip() for item in self.fields.get(field, "").split(",") if item.strip()]

    def touched(self) -> list[str]:
        """Return the files of the diff. New ones have no `a/` side."""
        return re.findall(r"^diff --git a/\S+ b/(\S+)$", self.diff, flags=re.MULTILINE)

    def mends(self) -> tuple[str, str]:
        path, _, text = self.fields.get("Mends", "").partition(" :: ")
        return path.strip(), text.strip().replace("\\n", "\n")

    def lint(self) -> list[str]:
        faults = [f"no {field}" for field in FIELDS if not self.fields.get(field)]
        faults += [f"unknown field {field}" for field in self.fields if field not in FIELDS]
        if not self.subject or self.subject.endswith(".") or len(self.subject) > 100:
            faults.append("the first line is to be a title of at most 100 characters, without a full stop")
        if re.match(r"\d", self.name) or not re.fullmatch(r"[a-z0-9-]+\.patch", self.name):
            faults.append(
                "names are lower-case words joined by hyphens, without numbers in front: `series` has the order"
            )
        if sorted(self.items("Touches")) != sorted(self.touched()):
            faults.append("Touches and the files of the diff differ")
        if not any(path.startswith("tests/") for path in self.touched()):
            faults.append("no test")
        if not all(self.mends()):
            faults.append("Mends is not `path :: text`")
        for line in self.diff.splitlines():
            if line.startswith("+") and line != line.rstrip():
                faults.append(f"space at the end of a line: {line!r}")
        return faults


@dataclass(frozen=True)
class Series:
    version: str
    patches: tuple[Patch, ...]

    @classmethod
    def read(cls, version: str) -> Series:
        return cls(version, tuple(Patch.read(FOLDER / version / name) for name in cls.names(version)))

    @staticmethod
    def names(version: str) -> list[str]:
        lines = (FOLDER / version / "series").read_text().splitlines()
        return [line.strip() for line in lines if line.strip() and not line.startswith("#")]

    @staticmethod
    def versions() -> list[str]:
        return sorted((p.parent.name for p in FOLDER.glob("*/series")), key=_sort_key)

    def lint(self) -> list[str]:
        faults = [f"{patch.name}: {fault}" for patch in self.patches for fault in patch.lint()]
        names = [patch.name for patch in self.patches]
        present = {path.name for path in (FOLDER / self.version).iterdir()} - {"series"}
        faults += [f"{name} is not in series" for name in sorted(present - set(names))]
        faults += [f"{name} is in series twice" for name in sorted({n for n in names if names.count(n) > 1})]
        return faults

    def touched(self) -> list[str]:
        return sorted({path for patch in self.patches for path in patch.touched()})

    def tests(self) -> list[str]:
        return sorted({path for patch in self.patches for path in patch.items("Tests")})

    def digest(self) -> str:
        return hashlib.sha256(b"\0".join(patch.diff.encode() for patch in self.patches)).hexdigest()

    def copy_touched(self, pristine: Path, folder: Path) -> Path:
        """Copy the files that the series touches, for `apply` and `reverse`, into a folder outside any repository."""
        for path in self.touched():
            if (pristine / path).is_file():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(pristine / path, folder / path)
        return folder

    def apply(self, folder: Path) -> None:
        for patch in self.patches:
            git_apply(patch, folder)

    def reverse(self, folder: Path) -> None:
        for patch in reversed(self.patches):
            git_apply(patch, folder, "--reverse")


def git_apply(patch: Patch, folder: Path, *options: str, exact: bool = True) -> None:
    """Apply one patch: never with fuzz, and if `exact` at the lines it names. Raise and change nothing otherwise."""
    # Within a repository git would resolve the paths of the patch against its root.
    env = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent), "LC_ALL": "C"}
    command = ["git", "apply", "--verbose", "--whitespace=nowarn", *options, "-"]
    result = subprocess.run(command, cwd=folder, env=env, input=patch.diff, capture_output=True, text=True, check=False)
    if result.returncode:
        errors = [line for line in result.stderr.splitlines() if line.startswith("error:")]
        raise PatchError(f"{patch.name}: " + "; ".join(errors or result.stderr.splitlines()[-3:]))
    if exact and (offsets := re.findall(r"Hunk #\d+ succeeded at .*offset.*", result.stderr)):
        raise PatchError(f"{patch.name}: applies, but not where it says: {'; '.join(offsets)}")
