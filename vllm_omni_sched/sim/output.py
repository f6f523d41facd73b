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
from typing import IO, Any, NamedTuple

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
_TRACKS = 1000  # range of thread numbers of a replica


class _Span(NamedTuple):
    """A span; times in nanoseconds, so that ends can be compared."""

    start: int
    end: int
    stage: str
    replica: int
    track: str
    name: str
    args: Mapping[str, Any] | None


class Spans:
    """Keeps the reports of servers and pools, up to a time and a number, and writes them.

    1. A span that begins before ``until`` seconds is kept, a later one is not.
    2. Beyond ``most`` spans and counters nothing more is kept; ``dropped`` counts the rest.
    3. Spans on one thread nest: spans of a replica that overlap only in part get threads of their own.

    ``wants(seconds)`` returns whether a span that begins then would be kept.
    """

    def __init__(self, until: float = float("inf"), most: int = MOST_EVENTS) -> None:
        self.until = until
        self.dropped = 0
        self._most = most
        self._spans: list[_Span] = []
        self._counters: list[tuple[int, str, str, float]] = []

    def __len__(self) -> int:
        """Return the number of spans and counters kept."""
        return len(self._spans) + len(self._counters)

    def wants(self, seconds: float) -> bool:
        """Return whether a span that begins at that time would be kept."""
        return seconds < self.until and len(self) < self._most

    def span(
        self,
        stage: str,
        replica: int,
        name: str,
        start: float,
        seconds: float,
        args: Mapping[str, Any] | None = None,
        track: str = "",
    ) -> None:
        """Add a span of work of a replica. ``track``: keeps it apart from other work, such as ``lane``.

        Raises:
            ValueError: it takes a negative time.
        """
        if seconds < 0:
            raise ValueError(f"span {name!r} of {stage!r} at {start} s takes {seconds} s")
        if self._kept(start):
            begin, end = round(start * 1e9), round((start + seconds) * 1e9)
            self._spans.append(_Span(begin, end, stage, replica, track, name, args))

    def counter(self, stage: str, name: str, at: float, value: float) -> None:
        """Set a number of a stage from then on."""
        if self._kept(at):
            self._counters.append((round(at * 1e9), stage, name, value))

    def _kept(self, start: float) -> bool:
        if start < self.until and len(self) >= self._most:
            self.dropped += 1
        return self.wants(start)

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
        stages: dict[str, int] = {}
        for stage in [*(one.stage for one in self._spans), *(one[1] for one in self._counters)]:
            if stage not in stages:
                stages[stage] = len(stages) + 1
                yield _named("process_name", f"{stage} (simulated)", stages[stage], 0)
        tracks = _Tracks()
        for one in sorted(self._spans, key=lambda span: (span.start, -span.end)):
            pid, (tid, fresh) = stages[one.stage], tracks.place(one)
            if fresh:
                yield _named("thread_name", fresh, pid, tid)
            event = {"ph": "X", "name": one.name, "pid": pid, "tid": tid}
            event |= {"ts": one.start / 1000, "dur": (one.end - one.start) / 1000}
            yield event | ({"args": dict(one.args)} if one.args else {})
        for at, stage, name, value in sorted(self._counters, key=lambda counter: counter[0]):
            yield {"ph": "C", "name": name, "pid": stages[stage], "ts": at / 1000, "args": {name: value}}


class _Tracks:
    """Assigns threads to spans, which must come in the order of their start, longer ones first."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, int, str], list[list[int]]] = {}
        self._tids: dict[tuple[str, int, str, int], int] = {}
        self._used: dict[tuple[str, int], int] = {}

    def place(self, span: _Span) -> tuple[int, str]:
        """Return the number of the thread, and its name if it is new."""
        track = span.stage, span.replica, span.track
        lanes = self._open.setdefault(track, [])
        at = 0
        for ends in lanes:
            while ends and ends[-1] <= span.start:
                ends.pop()
            if not ends or span.end <= ends[-1]:
                ends.append(span.end)
                break
            at += 1
        else:
            lanes.append([span.end])
        key = (*track, at)
        if key in self._tids:
            return self._tids[key], ""
        used = self._used[track[:2]] = self._used.get(track[:2], -1) + 1
        self._tids[key] = span.replica * _TRACKS + used
        parts = [f"replica {span.replica}", span.track, f"({at + 1})" if at else ""]
        return self._tids[key], " ".join(part for part in parts if part)


def _named(kind: str, name: str, pid: int, tid: int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
