"""The directory, private to this user, in which senders and receivers of an arena find each other.

A process is alive as long as it holds the lock of its file; the kernel releases it however the process ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from pathlib import Path

from vllm_omni_sched.clock import Clock
from vllm_omni_sched.config.errors import RendezvousError
from vllm_omni_sched.connector_names import ARENA_VARIABLE as ARENA_VARIABLE
from vllm_omni_sched.connectors.arena import meeting

OUTBOX, INBOX, POOL, STAGE, UNFINISHED, WAKE = ".out", ".in", ".pool", ".stage", ".new", ".wake"
UNFINISHED_FOR = 60.0
"""Seconds after which an unfinished file is stale: no living process takes that long to make it."""

TRIES = 100
"""Attempts to make a directory that other processes may be removing at the same time."""

_locks: set[int] = set()  # descriptors whose locks show that this process is alive


def _forget_locks() -> None:  # in a forked child: a copy of the descriptor would keep the lock when the parent has died
    for fd in _locks:
        with contextlib.suppress(OSError):
            os.close(fd)
    _locks.clear()


os.register_at_fork(after_in_child=_forget_locks)


def arena_directory(root: str, arena: str) -> Path:
    """Return ``<root>/vllm-omni-sched-<uid>/<arena>``, which is made if it does not exist.

    Raises:
        RendezvousError: it cannot be made, or another user could read or change its content.
    """
    home = Path(root) / f"vllm-omni-sched-{os.geteuid()}"
    gone: OSError = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    for _ in range(TRIES):
        try:
            _make_private(home)
            _make_private(home / arena)
            return home / arena
        except FileNotFoundError as error:  # the last process has just left, and has removed it
            gone = error
            if not Path(root).is_dir():
                break
        except OSError as error:
            raise _cannot_make(home / arena, error) from error
    raise _cannot_make(home, gone) from gone  # no directory can be made there, for instance in /proc


def _make_private(directory: Path) -> None:
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    found = directory.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and found.st_mode & 0o700 != 0o700:
        directory.chmod(found.st_mode & 0o077 | 0o700)  # a umask removed some of the bits, here or in another process
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise RendezvousError(
            f"{directory} is not a private directory of this user (owner {found.st_uid}, mode "
            f"{stat.S_IMODE(found.st_mode):o}); remove it, or set the connector's option `directory`"
        )


def _cannot_make(directory: Path, error: OSError) -> RendezvousError:
    return RendezvousError(
        f"cannot make or open {directory} ({error.strerror}); set the connector's option `directory` to a file system "
        "in memory that this user can write"
    )


def enter(root: str, arena: str) -> tuple[Path, int]:
    """Enter an arena; return its directory, and the descriptor whose shared lock marks this process as a member.

    Arenas whose processes were all killed are removed.

    Raises:
        RendezvousError: see `arena_directory`.
    """
    for _ in range(TRIES):
        directory = arena_directory(root, arena)
        try:
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:  # the last process has just left, and has removed it
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
    """Leave an arena; the last process removes it."""
    let_go(fd)
    _remove_if_empty_of_life(directory)
    _remove_if_empty(directory.parent)


def sweep(home: Path) -> int:
    """Remove the arenas of this user in which no process is alive; return how many."""
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
            return False  # it was removed and made again since it was opened: the lock belongs to the old one
        for path in directory.iterdir():
            path.unlink(missing_ok=True)
        directory.rmdir()
    except OSError:  # a process in it is alive, or it holds files of other programs
        return False
    finally:
        os.close(fd)
    return True


def _remove_if_empty(directory: Path) -> None:
    with contextlib.suppress(OSError):
        directory.rmdir()


def is_private(fd: int) -> bool:
    """Return whether an open file is a regular one of this user that no other user may open."""
    found = os.fstat(fd)
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def create(path: Path, nbytes: int) -> int:
    """Make a private file, allocate its memory, and return its descriptor.

    Raises:
        OSError: ENOSPC; without allocation, a later write would kill the process instead.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.fchmod(fd, 0o600)  # independent of the umask
        if nbytes:
            os.posix_fallocate(fd, 0, nbytes)
    except OSError:
        os.close(fd)
        path.unlink(missing_ok=True)
        raise
    return fd


def live(path: Path) -> int:
    """Show by a lock on its file that this process is alive; return the descriptor for `let_go`.

    It opens a descriptor of its own: a mapping keeps a copy of its descriptor, which forked children would inherit.
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
    """Release a lock of `live` or `enter`; does nothing in a forked child, which does not hold it."""
    if fd in _locks:
        _locks.discard(fd)
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def is_alive(path: Path) -> bool:
    """Return whether the process that owns this file is alive.

    True if that is unknown: in an arena that was removed, or when this process has no descriptor left.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return not path.parent.exists()
    except OSError as error:
        return error.errno not in (errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENOTDIR)  # not a file of this package
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def remove_member(path: Path) -> None:
    """Remove the pools of an outbox and then its file, so that an interrupted removal can be repeated."""
    for own in (*path.parent.glob(f"{path.stem}.*{POOL}"), path):
        own.unlink(missing_ok=True)


def tidy(directory: Path, own: Path) -> None:
    """Remove inboxes and announcements of dead processes, and outboxes whose makers died before they were ready.

    Args:
        own: a file of the caller, whose time stamp tells the file system's time.
    """
    try:
        os.utime(own)
        now = own.stat().st_mtime
    except FileNotFoundError:  # files were removed by hand
        return
    for path in (found for suffix in (INBOX, STAGE, UNFINISHED) for found in directory.glob(f"*{suffix}")):
        with contextlib.suppress(FileNotFoundError):
            born = path.suffix != UNFINISHED or now - path.stat().st_mtime > UNFINISHED_FOR
            if born and not is_alive(path):
                path.unlink()


SETTLES = 0.05
"""Seconds within which a directory may change again without a new time stamp."""


def post(path: Path, content: bytes = b"") -> int:
    """Make a private file that appears complete and locked; return the descriptor for `take_away`.

    Raises:
        OSError: no room, no descriptors, or the directory was removed; no file is left.
    """
    unfinished = path.with_suffix(meeting.UNFINISHED)
    with contextlib.ExitStack() as undo:
        fd = meeting.create(unfinished, 0)
        undo.callback(unfinished.unlink, missing_ok=True)
        with os.fdopen(fd, "wb") as file:
            file.write(content)
        life = meeting.live(unfinished)
        undo.callback(meeting.let_go, life)
        unfinished.rename(path)
        undo.pop_all()
    return life


def take_away(path: Path, life: int) -> None:
    """Remove an announcement."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
    meeting.let_go(life)


class Listing:
    """Names in a directory, read again when the directory has changed."""

    def __init__(self, directory: Path, clock: Clock) -> None:
        self._directory, self._clock = directory, clock
        self._stamp, self._changed_at = -1, 0.0

    def names(self, again: bool = False) -> list[str] | None:
        """Return all names; None if they are unchanged, unless ``again`` forces a read.

        Raises:
            OSError: the directory cannot be read; the next call tries again.
        """
        stamp, now = os.stat(self._directory).st_mtime_ns, self._clock()
        if not again and stamp == self._stamp and now - self._changed_at > SETTLES:
            return None
        names = os.listdir(self._directory)
        if stamp != self._stamp:
            self._stamp, self._changed_at = stamp, now
        return names
