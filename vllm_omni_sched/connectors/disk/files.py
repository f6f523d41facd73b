"""Files of messages, written completely or not at all and taken by one process only, and who shares their directory."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import itertools
import os
import secrets
import threading
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vllm_omni_sched.clock import Clock
from vllm_omni_sched.config.errors import CorruptMessageError
from vllm_omni_sched.connectors.arena import meeting
from vllm_omni_sched.connectors.framing import Message

MESSAGE, UNFINISHED, TAKEN, LIFE = ".msg", ".new", ".got", ".life"
EXPIRES_AFTER = 5.0  # seconds after its time that a message may stay, so that its sender sees it expire
_NOREPLACE = 1
_AT_FDCWD = -100
_libc = ctypes.CDLL(None, use_errno=True)


class Stamp(NamedTuple):
    """Identifies a file, to distinguish it from a later one of the same name."""

    inode: int
    put_at_ns: int


def write(path: Path, message: Message, put_at: float, checked: bool) -> Stamp:
    """Write a message to a new private file; its modification time is ``put_at``, in seconds of the sender's clock.

    Args:
        checked: see `Message.write_to`.

    Raises:
        OSError: ENOSPC, EDQUOT, EFBIG, ...; no file is left.
    """
    fd = meeting.create(path, message.nbytes)
    try:
        for piece in message.pieces(checked):  # calls, not a mapping: new pages of one take eight times as long
            left = memoryview(piece)
            while len(left):
                left = left[os.write(fd, left) :]
        put_at_ns = int(put_at * 1e9)
        os.utime(fd, ns=(put_at_ns, put_at_ns))
        return Stamp(os.fstat(fd).st_ino, put_at_ns)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


def read(path: Path) -> np.ndarray:
    """Return the content of a file, in memory of its own: shape (nbytes,), uint8.

    Raises:
        CorruptMessageError: it is not a private file of this user.
        OSError: it cannot be read now.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if not meeting.is_private(fd):
            raise CorruptMessageError(f"{path} is not a private file of this user")
        data = np.empty(os.fstat(fd).st_size, np.uint8)
        with open(fd, "rb", buffering=0, closefd=False) as file:
            view, at = memoryview(data.data), 0
            while at < len(view) and (got := file.readinto(view[at:])):
                at += got
        return data[:at]
    finally:
        os.close(fd)


def stamp_of(path: Path) -> Stamp | None:
    """Return the stamp of the file with that name; None if there is none."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    return Stamp(found.st_ino, found.st_mtime_ns)


def rename_if_free(source: Path, target: Path) -> bool:
    """Rename in one step unless ``target`` exists; return False if it does, or ``source`` is gone."""
    old, new = os.fsencode(source), os.fsencode(target)
    if not _libc.renameat2(_AT_FDCWD, old, _AT_FDCWD, new, _NOREPLACE):
        return True
    number = ctypes.get_errno()
    if number in (errno.EEXIST, errno.ENOENT):
        return False
    try:  # a file system without that call, such as NFS: a process that dies in between leaves two names of one message
        os.link(source, target, follow_symlinks=False)
    except (FileExistsError, FileNotFoundError):
        return False
    source.unlink(missing_ok=True)
    return True


class Members:
    """Membership of this process in a directory of messages; the process is alive as long as it holds a file's lock.

    ::

        <token>.life                      a process
        <digest>.msg                      a message that waits
        <digest>.<token>.<number>.new     one that is being written by that process
        <digest>.<token>.<number>.got     one that is being read by it

    Raises:
        OSError: nothing can be written there.
    """

    def __init__(self, directory: Path, clock: Clock, ttl_seconds: float) -> None:
        self.directory, self._clock, self._ttl_seconds = directory, clock, ttl_seconds
        while True:
            self.number = secrets.randbits(32)
            self.path = self.file_of(self.number)
            try:
                os.close(meeting.create(self.path, 0))
                break
            except FileExistsError:
                continue
        self._life = [meeting.live(self.path)]
        self._names = itertools.count()
        self._sweeping = threading.Lock()
        self.counts = {"given_back": 0, "orphans_expired": 0}

    def file_of(self, number: int) -> Path:
        """Return the lock file of a process."""
        return self.directory / f"{number:08x}{LIFE}"

    def is_alive(self, number: int) -> bool:
        """Return whether that process is alive."""
        return number == self.number or meeting.is_alive(self.file_of(number))

    def message(self, name: bytes) -> Path:
        """Return the path of a waiting message."""
        return self.directory / f"{digest_of(name)}{MESSAGE}"

    def own_file(self, name: bytes, kind: str) -> Path:
        """Return an unused path for a file of this process alone."""
        return self.directory / f"{digest_of(name)}.{self.number:08x}.{next(self._names)}{kind}"

    def sweep(self) -> None:
        """Give back messages of dead processes, and remove unreachable and expired ones."""
        if self._sweeping.acquire(blocking=False):
            try:
                self._sweep()
            finally:
                self._sweeping.release()

    def close(self) -> None:
        """Leave the directory."""
        for life in self._life:
            self.path.unlink(missing_ok=True)
            meeting.let_go(life)
        self._life.clear()

    def _sweep(self) -> None:
        now = self._clock()
        for path in sorted(self.directory.iterdir()):
            parts = path.name.split(".")
            if path.suffix == MESSAGE:
                stamp = stamp_of(path)
                # later than its sender would, which may not know that it was given back, or has died
                if stamp is not None and now - stamp.put_at_ns / 1e9 > self._ttl_seconds + EXPIRES_AFTER:
                    self._expire(path, stamp)
            elif path.suffix in (UNFINISHED, TAKEN) and len(parts) == 4 and not self.is_alive(_number(parts[1])):
                if path.suffix == TAKEN and rename_if_free(path, self.directory / f"{parts[0]}{MESSAGE}"):
                    self.counts["given_back"] += 1
                path.unlink(missing_ok=True)  # unfinished, or replaced meanwhile
            elif path.suffix == LIFE and not self.is_alive(_number(parts[0])):
                path.unlink(missing_ok=True)

    def take(self, path: Path, name: bytes, stamp: Stamp) -> Path | None:
        """Take a message that waits at ``path``; return its path now, None if it was received or put anew."""
        taken = self.own_file(name, TAKEN)
        if stamp_of(path) != stamp:
            return None
        try:
            os.rename(path, taken)
        except FileNotFoundError:
            return None
        if stamp_of(taken) != stamp:  # another process has put it meanwhile
            rename_if_free(taken, path)
            return None
        return taken

    def _expire(self, path: Path, stamp: Stamp) -> None:
        if (taken := self.take(path, path.name.encode(), stamp)) is not None:
            taken.unlink()
            self.counts["orphans_expired"] += 1


def digest_of(name: bytes) -> str:
    """Return the file name for a message's name. A receiver compares the name in the message."""
    return hashlib.blake2b(name, digest_size=16).hexdigest()


def _number(text: str) -> int:
    try:
        return int(text, 16)
    except ValueError:
        return 0
