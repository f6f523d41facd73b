"""Append lines to a bounded file of the current user, from any thread, without ever waiting for the disk."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import queue
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from vllm_omni_sched.logs import get_logger

logger = get_logger(__name__)

KEPT_LINES = 4096
"""Lines that wait for the disk; more are dropped, and counted."""
CLOSE_SECONDS = 2.0
PREVIOUS = ".1"  # suffix of the file with the older lines


def lines_of(file: Path) -> Iterator[bytes]:
    """Yield the lines of both files, the older one first, without empty ones.

    Raises:
        OSError: neither can be read.
    """
    for each in _files(file):
        with each.open("rb") as lines:
            yield from _not_empty(lines)


def last_lines_of(file: Path, most_bytes: int) -> list[bytes]:
    """Return the whole lines in the last bytes of both files together, the oldest first, without empty ones.

    Raises:
        OSError: neither can be read.
    """
    found: list[bytes] = []
    for each in reversed(_files(file)):
        with each.open("rb") as lines:
            start = max(0, lines.seek(0, os.SEEK_END) - most_bytes)
            lines.seek(start)
            text = lines.read(most_bytes)
        most_bytes -= len(text)
        whole = text.partition(b"\n")[2] if start else text
        found[:0] = _not_empty(whole.split(b"\n"))
        if start or most_bytes <= 0:
            break
    return found


def _files(file: Path) -> list[Path]:
    """Return those of the two files that exist, the older one first; if neither does, the newer one."""
    return [one for one in (_previous(file), file) if one.exists()] or [file]


def _previous(file: Path) -> Path:
    return file.with_name(file.name + PREVIOUS)


def _not_empty(lines: Iterable[bytes]) -> Iterator[bytes]:
    return (line for line in lines if line.strip())


class BoundedLog:
    """A file of lines, and a second one with the lines before them, which together have at most ``max_bytes``.

    1. `write` never waits and never raises: a thread writes the lines. If the disk is slower than the lines come, or
       cannot be written, lines are dropped and counted, and one warning is logged until writing works again. The next
       line that is written then tells how many were lost.
    2. A file that would get larger than half of ``max_bytes`` becomes the second file, which it replaces.
    3. Both files belong to the current user and have mode 0600. A link, or a file of another user, is not written.
    4. A lock keeps a second process from writing the same file.
    5. Each line is written by one call. If the process dies in between, the rest of the line is missing, and the next
       process begins a new line.

    Args:
        name: what the file is, for log lines.
        lost: makes the line that tells how many lines were lost.
    """

    def __init__(self, path: Path, max_bytes: int, name: str, lost: Callable[[int], bytes]) -> None:
        self._path, self._most, self._name, self._lost = path, max_bytes // 2, name, lost
        self._lines: queue.Queue[bytes | None] = queue.Queue(KEPT_LINES)
        self._file: int | None = None
        self._size = 0
        self._dropped = 0  # lines that the queue had no room for; written by any thread, so only nearly exact
        self._failed = 0  # lines that could not be written; used by the thread alone
        self._complained = False
        self._thread = threading.Thread(target=self._run, name="bounded-log", daemon=True)
        self._thread.start()

    def write(self, line: bytes) -> None:
        """Append a line, which ends with a newline."""
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._dropped += 1

    def close(self) -> None:
        """Write the lines that wait, within `CLOSE_SECONDS`, and close the file."""
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._append(line)
            except OSError as error:
                self._failed += 1
                self._release()
                if not self._complained:
                    self._complained = True
                    logger.warning(
                        "the %s %s cannot be written (%s); entries are dropped until it can",
                        self._name,
                        self._path,
                        error.strerror or error,
                    )
        self._release()

    def _append(self, line: bytes) -> None:
        if self._file is None:
            self._file = self._open()
        if self._size and self._size + len(line) > self._most:
            self._rotate()
        missed = self._dropped + self._failed
        if missed:
            self._write(self._lost(missed))
            self._dropped = self._failed = 0
        self._write(line)
        if self._complained:
            self._complained = False
            logger.warning("the %s %s is written again; %d entries were dropped", self._name, self._path, missed)

    def _write(self, line: bytes) -> None:
        assert self._file is not None
        written = os.write(self._file, line)
        if written < len(line):  # the disk is nearly full: a part of a line would spoil the next one
            os.ftruncate(self._file, self._size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += written

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        file = os.open(self._path, flags, 0o600)
        try:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                raise OSError(errno.EPERM, "it is not a file of this user")
            os.fchmod(file, 0o600)  # whatever the umask is
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise OSError(errno.EWOULDBLOCK, "another process writes it") from None
            self._size = found.st_size
            if self._size and os.pread(file, 1, self._size - 1) != b"\n":
                self._size += os.write(file, b"\n")
        except BaseException:
            os.close(file)
            raise
        return file

    def _rotate(self) -> None:
        assert self._file is not None
        os.replace(self._path, _previous(self._path))
        self._release()
        self._file = self._open()

    def _release(self) -> None:
        if self._file is not None:
            os.close(self._file)  # and give up the lock
            self._file = None
