"""Limits on the files that a decoder process may read (Linux 5.13) and the processes it may signal (6.12), by
Landlock.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Iterable

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # the same numbers on all machines
_VERSION_FLAG, _PATH_BENEATH = 1, 1
_EXECUTE, _READ_FILE, _READ_DIR = 1, 4, 8
_KNOWN_RIGHTS = (1 << 13) - 1  # of the first version: files and directories
_SCOPES, _SCOPED_SINCE = 1 | 2, 6  # abstract sockets, signals: to this process's own only


def version() -> int:
    """Return the version of the kernel's Landlock; 0 if it has none."""
    return max(0, int(_libc().syscall(_CREATE, None, 0, _VERSION_FLAG)))


def restrict(paths: Iterable[str]) -> None:
    """Restrict this thread, and threads it starts, to reading beneath ``paths``, and to signalling each other.

    Paths that do not exist are left out.

    Raises:
        OSError: the kernel refuses the restriction.
    """
    libc = _libc()
    handled = struct.pack("=Q", _KNOWN_RIGHTS)
    if version() >= _SCOPED_SINCE:
        handled = struct.pack("=QQQ", _KNOWN_RIGHTS, 0, _SCOPES)
    rules = _checked(libc.syscall(_CREATE, handled, len(handled), 0))
    try:
        for path in paths:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                _allow(libc, rules, path)
        _checked(libc.syscall(_RESTRICT, rules, 0))
    finally:
        os.close(rules)


def _allow(libc: ctypes.CDLL, rules: int, path: str) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rights = _EXECUTE | _READ_FILE | (_READ_DIR if os.path.isdir(path) else 0)
        _checked(libc.syscall(_ADD, rules, _PATH_BENEATH, struct.pack("=Qi", rights, fd), 0))
    finally:
        os.close(fd)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
