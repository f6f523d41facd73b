"""Files of messages: written completely or not at all, and taken by one process only."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vllm_omni_sched.config.errors import CorruptMessageError
from vllm_omni_sched.connectors.arena import meeting
from vllm_omni_sched.connectors.framing import Message
from vllm_omni_sched.connectors.framing.layout import HEAD, MAGIC, VERSION

MESSAGE, UNFINISHED, TAKEN, LIFE, TICKET, TAKEN_TICKET = ".msg", ".new", ".got", ".life", ".move", ".moved"
_NOREPLACE = 1
_AT_FDCWD = -100
_libc = ctypes.CDLL(None, use_errno=True)


class Stamp(NamedTuple):
    """Identifies a file, to distinguish it from a later one of the same name."""

    inode: int
    put_at_ns: int


def write(path: Path, message: Message, generation: int, put_at: float, checked: bool) -> Stamp:
    """Write a message to a new private file; its modification time is ``put_at``, in seconds of the sender's clock.

    Args:
        checked: see `Message.write_to`.

    Raises:
        OSError: ENOSPC, EDQUOT, EFBIG, ...; no file is left.
    """
    fd = meeting.create(path, message.nbytes)
    try:
        for piece in message.pieces(
            generation, checked
        ):  # calls, not a mapping: new pages of one take eight times as long
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


def generation_in(path: Path) -> int | None:
    """Return the generation in a message's header; None if the file is gone or not a message."""
    try:
        with open(path, "rb", buffering=0) as file:
            head = HEAD.unpack(file.read(HEAD.size))
    except (OSError, ValueError, struct.error):
        return None
    return int(head[7]) if (head[1], head[2]) == (MAGIC, VERSION) else None


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
