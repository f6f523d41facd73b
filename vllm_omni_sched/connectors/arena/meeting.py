"""Where senders and receivers of one arena find each other: a directory of this user alone.

A process is alive as long as it holds the lock of its file; the kernel lets go of it however the process ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from pathlib import Path

from vllm_omni_sched.connector_names import ARENA_VARIABLE as ARENA_VARIABLE
from vllm_omni_sched.errors import RendezvousError

OUTBOX, INBOX, POOL, STAGE, UNFINISHED = ".out", ".in", ".pool", ".stage", ".new"
UNFINISHED_FOR = 60.0
"""Seconds: no living process needs as long to make its outbox."""

TRIES = 100
"""Times that a directory is made which others may be taking away just then."""

_locks: set[int] = set()  # descriptors whose locks say that this process is alive


def _forget_locks() -> None:  # in a forked child: a copy of the descriptor would keep the lock when the parent has died
    for fd in _locks:
        with contextlib.suppress(OSError):
            os.close(fd)
    _locks.clear()


os.register_at_fork(after_in_child=_forget_locks)


def arena_directory(root: str, arena: str) -> Path:
    """``<root>/vllm-omni-sched-<uid>/<arena>``, made if it is not there.

    Raises:
        RendezvousError: it cannot be made, or somebody else could read or change what is in it.
    """
    home = Path(root) / f"vllm-omni-sched-{os.geteuid()}"
    gone: OSError = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    for _ in range(TRIES):
        try:
            _make_private(home)
            _make_private(home / arena)
            return home / arena
        except FileNotFoundError as error:  # somebody has left just now, and has taken it away
            gone = error
            if not Path(root).is_dir():
                break
        except OSError as error:
            raise _cannot_make(home / arena, error) from error
    raise _cannot_make(home, gone) from gone  # no directory can be made there, as in /proc


def _make_private(directory: Path) -> None:
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    found = directory.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and found.st_mode & 0o700 != 0o700:
        directory.chmod(found.st_mode & 0o077 | 0o700)  # a umask has taken something of it, here or in another process
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise RendezvousError(
            f"{directory} is not a directory of this user alone (owner {found.st_uid}, mode "
            f"{stat.S_IMODE(found.st_mode):o}); remove it, or set the connector's option `directory`"
        )


def _cannot_make(directory: Path, error: OSError) -> RendezvousError:
    return RendezvousError(
        f"cannot make or open {directory} ({error.strerror}); set the connector's option `directory` to a file system "
        "in memory that this user can write"
    )


def enter(root: str, arena: str) -> tuple[Path, int]:
    """Be counted in an arena: its directory, and the descriptor whose shared lock says so.

    What was left in other arenas, by processes that were all killed, goes.

    Raises:
        RendezvousError: see `arena_directory`.
    """
    for _ in range(TRIES):
        directory = arena_directory(root, arena)
        try:
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:  # the last one has left just now, and has taken it away
            continue
        except OSError as error:
            raise _cannot_make(directory, error) from error
        fcntl.flock(fd, fcntl.LOCK_SH)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), directory.stat()):
                break
        os.close(fd)
    else:
        raise _cannot_make(directory, FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)))
    _locks.add(fd)
    sweep(directory.parent)
    return directory, fd


def leave(directory: Path, fd: int) -> None:
    """Be counted no longer; the last one takes the arena away."""
    let_go(fd)
    _remove_if_empty_of_life(directory)
    _remove_if_empty(directory.parent)


def sweep(home: Path) -> int:
    """Remove the arenas of this user in which no process is alive; how many."""
    arenas = [path for path in home.iterdir() if path.is_dir() and not path.is_symlink()] if home.is_dir() else []
    gone = sum(_remove_if_empty_of_life(arena) for arena in arenas)
    _remove_if_empty(home)
    return gone


def _remove_if_empty_of_life(directory: Path) -> bool:
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(fd), directory.stat()):
            return False  # it was removed and made again since it was opened: the lock is of the old one
        for path in directory.iterdir():
            path.unlink(missing_ok=True)
        directory.rmdir()
    except OSError:  # somebody is alive in there, or it holds what we have not made
        return False
    finally:
        os.close(fd)
    return True


def _remove_if_empty(directory: Path) -> None:
    with contextlib.suppress(OSError):
        directory.rmdir()


def is_private(fd: int) -> bool:
    """Whether an open file is a regular one of this user that nobody else may open."""
    found = os.fstat(fd)
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def create(path: Path, nbytes: int) -> int:
    """A new private file with its memory set aside; its descriptor.

    Raises:
        OSError: ENOSPC, where writing to a file that was only made long would end the process.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.fchmod(fd, 0o600)  # whatever the umask
        if nbytes:
            os.posix_fallocate(fd, 0, nbytes)
    except OSError:
        os.close(fd)
        path.unlink(missing_ok=True)
        raise
    return fd


def live(path: Path) -> int:
    """Say that this process is alive by a lock on its file; the descriptor that `let_go` takes.

    One of its own: a mapping keeps a copy of the descriptor it was made with, which forked children would inherit.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(fd)
        raise
    _locks.add(fd)
    return fd


def let_go(fd: int) -> None:
    """Take back what `live` or `enter` said; nothing in a forked child, which never said it."""
    if fd in _locks:
        _locks.discard(fd)
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def is_alive(path: Path) -> bool:
    """Whether the process whose file this is runs still; yes, for all we know, where that cannot be seen: in an arena
    that was removed, or when this process has no descriptor left.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return not path.parent.exists()
    except OSError as error:
        return error.errno not in (errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENOTDIR)  # no file of ours
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def remove_member(path: Path) -> None:
    """Remove the pools of an outbox and then its file: who is killed in between has left something to remove."""
    for own in (*path.parent.glob(f"{path.stem}.*{POOL}"), path):
        own.unlink(missing_ok=True)


def tidy(directory: Path, own: Path) -> None:
    """Remove the inboxes and announcements of the dead, and outboxes whose makers died before they were ready.

    Args:
        own: a file of the caller; its time stamp tells what time it is for the file system.
    """
    try:
        os.utime(own)
        now = own.stat().st_mtime
    except FileNotFoundError:  # somebody removes files by hand
        return
    for path in (found for suffix in (INBOX, STAGE, UNFINISHED) for found in directory.glob(f"*{suffix}")):
        with contextlib.suppress(FileNotFoundError):
            born = path.suffix != UNFINISHED or now - path.stat().st_mtime > UNFINISHED_FOR
            if born and not is_alive(path):
                path.unlink()
