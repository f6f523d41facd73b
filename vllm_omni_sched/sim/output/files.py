"""Write result files atomically, and record the provenance of their numbers: all that is needed to reproduce them."""

import datetime
import os
import platform
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from vllm_omni_sched.config.extras import version_of


@contextmanager
def replacing(path: Path) -> Iterator[IO[str]]:
    """Yield a text file that replaces ``path`` at the end, unless the block raises.

    Raises:
        OSError: the folder cannot be written to.
    """
    with temporary(path) as name, open(name, "w", encoding="utf-8") as file:
        yield file


def write_text(path: Path, text: str) -> None:
    """Write a text file that replaces ``path`` as a whole.

    Raises:
        OSError: the folder cannot be written to.
    """
    with replacing(path) as file:
        file.write(text)


@contextmanager
def temporary(path: Path) -> Iterator[Path]:
    """Yield the name of an empty file beside ``path`` that replaces it at the end, unless the block raises.

    Raises:
        OSError: the folder cannot be written to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.", suffix=path.suffix)
    os.close(handle)
    written = Path(name)
    try:
        yield written
        written.chmod(0o666 & ~_mask())
        os.replace(written, path)
    finally:
        written.unlink(missing_ok=True)


def _mask() -> int:
    """Return the process's umask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


_ROOT = Path(__file__).resolve().parents[3]


def provenance(command: Sequence[str], seed: int, sources: Mapping[str, str], workload: str) -> dict[str, Any]:
    """Return the header of a result file. Paths in the command are reduced to their last part.

    Args:
        command: the command as typed, the program first.
        sources: source of the costs by stage.
        workload: its kind.
    """
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(_shorten(word) for word in command),
        "revision": revision(),
        "version": version_of("vllm-omni-sched"),
        "python": platform.python_version(),
        "numpy": version_of("numpy"),
        "seed": seed,
        "costs": dict(sources),
        "workload": workload,
    }


def revision() -> str | None:
    """Return the commit, with `+` if the package differs from it; None outside a checkout."""
    if not (_ROOT / ".git").exists():
        return None
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        return commit + ("+" if _git("status", "--porcelain", "--", "vllm_omni_sched") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(_ROOT), *arguments], capture_output=True, text=True, check=True
    ).stdout.strip()


def _shorten(word: str) -> str:
    head, equals, tail = word.rpartition("=")
    return f"{head}{equals}{Path(tail).name}" if Path(tail).is_absolute() else word
