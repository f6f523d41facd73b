"""Private directories in which engine cores leave their metrics for the API process, locked while the writer lives.

::

    <temporary directory>/vllm-omni-sched-<uid>/     0700, refused if another user owns it
        .lock                                        taken while a directory is made or reclaimed
        <instance>-<engine>-<pid>/                   0700, locked by its engine core until that process ends
            engine.json                              the writer: labels, process lineage, scrape group
            metrics.prom                             Prometheus text, replaced whole

The operating system drops the lock with the process, so a directory whose lock is free has no owner, and the next
engine core to start removes it: process ids are not relied on to stay unique.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

_IDENTITY = "engine.json"
_METRICS = "metrics.prom"
_LARGEST_READ_BYTES = 1 << 20


def default_base() -> Path:
    """Return the directory of this user; processes of one server agree on it because they share TMPDIR."""
    return Path(tempfile.gettempdir()) / f"vllm-omni-sched-{os.getuid()}"


def lineage() -> list[str]:
    """Return this process and its ancestors, nearest first, as ``pid@start``: a reused pid is another process.

    Without /proc, only this process and its parent are known, by pid alone.
    """
    chain: list[str] = []
    pid = os.getpid()
    while pid > 0:
        try:
            status = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            break
        fields = status.rpartition(")")[2].split()  # the name before it may hold blanks and brackets
        chain.append(f"{pid}@{fields[19]}")
        pid = int(fields[1])
    return chain or [str(os.getpid()), str(os.getppid())]


def scrape_group() -> str | None:
    """Return the hash of Prometheus' multiprocess directory, which several API servers of one vLLM share; None
    without.
    """
    directory = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    return hashlib.sha256(directory.encode()).hexdigest() if directory else None


class EngineDirectory:
    """The directory of one engine core; made by `create`, in the process that writes to it."""

    def __init__(self, path: Path, lock: int, labels: Mapping[str, str]) -> None:
        self.path = path
        self._lock = lock
        self._labels = dict(labels)
        self._pid = os.getpid()

    @classmethod
    def create(cls, name: str, labels: Mapping[str, str], base: Path | None = None) -> "EngineDirectory":
        """Remove the directories of dead engine cores, then make and lock one named after ``name``.

        Raises:
            OSError: the base directory cannot be made, or is not private to this user.
        """
        base = base or default_base()
        _make_private(base)
        with _base_lock(base):
            _reclaim(base)
            path = Path(tempfile.mkdtemp(prefix=re.sub(r"[^A-Za-z0-9_]+", "-", name) + "-", dir=base))
            path.chmod(0o700)
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(lock, fcntl.LOCK_EX)
        directory = cls(path, lock, labels)
        identity = {"labels": directory._labels, "lineage": lineage(), "group": scrape_group()}
        _replace(path / _IDENTITY, json.dumps(identity).encode())
        return directory

    def write(self, page: bytes) -> None:
        """Replace the metrics page; a reader sees the old one or the new one, whole.

        Raises:
            OSError: the file system is full, read-only or gone.
        """
        _replace(self.path / _METRICS, page)

    def close(self) -> None:
        """Remove the directory and release its lock; idempotent. A forked process only closes its descriptor."""
        if self._lock >= 0:
            if self._pid == os.getpid():
                shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def live_pages(base: Path | None = None) -> Iterator[tuple[dict[str, str], str]]:
    """Yield labels and metrics page of every live engine core that belongs to this process.

    An engine core belongs to the process that started it (directly or through others, or is the same process), and to
    every process of its scrape group. Directories that disappear or are half written meanwhile are left out.
    """
    base = base or default_base()
    me, group = lineage()[0], scrape_group()
    try:
        paths = sorted(base.iterdir()) if _is_private(base) else []
    except OSError:
        return
    for path in paths:
        try:
            if not path.is_dir() or not _is_locked(path):
                continue
            identity = json.loads(_read(path / _IDENTITY))
            if me in identity["lineage"] or (group is not None and group == identity["group"]):
                yield dict(identity["labels"]), _read(path / _METRICS)
        except (OSError, ValueError, KeyError, TypeError):
            continue


def _make_private(base: Path) -> None:
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = os.lstat(base)
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and stat.S_IMODE(status.st_mode) < 0o700:
        base.chmod(0o700)  # the umask removed some of the bits
    if not _is_private(base):
        raise PermissionError(f"{base} is not a directory that only this user can enter: remove it, or set TMPDIR")


def _is_private(base: Path) -> bool:
    status = os.lstat(base)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


@contextmanager
def _base_lock(base: Path) -> Iterator[None]:
    descriptor = os.open(base / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        os.fchmod(descriptor, 0o600)  # whatever the umask
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _reclaim(base: Path) -> None:
    for path in base.iterdir():
        if path.is_dir() and not path.is_symlink() and not _is_locked(path):
            shutil.rmtree(path, ignore_errors=True)


def _is_locked(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _replace(path: Path, content: bytes) -> None:
    draft = path.with_name(f".{path.name}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, 0o600)
        file.write(content)
    os.replace(draft, path)


def _read(path: Path) -> str:
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        return file.read(_LARGEST_READ_BYTES).decode()
