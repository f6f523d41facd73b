"""Write result files atomically with the provenance of their numbers, and a trace of a run for Perfetto."""

import datetime
import json
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


MOST_EVENTS = 400_000


class Spans:
    """Keeps what replicas report, up to a time and a number, and writes it for `ui.perfetto.dev`.

    Chrome's trace events as JSON: a process for each stage, a thread for each replica, and beside them the requests,
    which overlap. A span that begins before ``until`` seconds is kept; of those beyond ``most``, which are not,
    ``dropped`` is the number.
    """

    def __init__(self, until: float = float("inf"), most: int = MOST_EVENTS) -> None:
        self.until = until
        self.dropped = 0
        self._most = most
        self._spans: list[tuple[str, int, str, float, float, Mapping[str, Any] | None]] = []

    def __len__(self) -> int:
        """Return the number of spans kept."""
        return len(self._spans)

    def wants(self, seconds: float) -> bool:
        """Return whether a span that begins at that time would be kept."""
        return seconds < self.until and len(self) < self._most

    def span(
        self, stage: str, replica: int, name: str, start: float, seconds: float, args: Mapping[str, Any] | None = None
    ) -> None:
        """Add a span; with ``args`` it is work of the replica beside no other, without a request in it."""
        if self.wants(start):
            self._spans.append((stage, replica, name, start, seconds, args))
        elif start < self.until:
            self.dropped += 1

    def write(self, path: Path) -> None:
        """Write all that is kept as JSON; only one event at a time is built in memory.

        Raises:
            OSError: the file cannot be written; no partial file remains.
        """
        with replacing(path) as file:
            file.write('{"displayTimeUnit": "ms", "otherData": {"simulated": true}, "traceEvents": [\n')
            for number, event in enumerate(self._events()):
                file.write((",\n" if number else "") + json.dumps(event, separators=(",", ":")))
            file.write("\n]}\n")

    def _events(self) -> Iterator[dict[str, Any]]:
        stages = {name: pid for pid, name in enumerate(dict.fromkeys(one[0] for one in self._spans), 1)}
        for name, pid in stages.items():
            yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": f"{name} (simulated)"}}
        for stage, replica in dict.fromkeys(one[:2] for one in self._spans):
            named = {"name": f"replica {replica}"}
            yield {"ph": "M", "name": "thread_name", "pid": stages[stage], "tid": replica, "args": named}
        for number, (stage, replica, name, start, seconds, args) in enumerate(self._spans):
            event = {"name": name, "pid": stages[stage], "tid": replica, "ts": start * 1e6}
            if args is None:
                yield {"ph": "b", "cat": "requests", "id": number, **event}
                yield {"ph": "e", "cat": "requests", "id": number, **event, "ts": (start + seconds) * 1e6}
            else:
                yield {"ph": "X", **event, "dur": seconds * 1e6, "args": dict(args)}
