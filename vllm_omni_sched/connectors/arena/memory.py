"""A mapped file whose memory is allocated before it is written to."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import struct
import threading
from pathlib import Path

_FLOCK = struct.Struct("@hhqqi")  # struct flock of 64-bit Linux: type, from the start of the file, where, how long
_SETLK, _WRLCK, _UNLCK = fcntl.F_OFD_SETLK, fcntl.F_WRLCK, fcntl.F_UNLCK
_libc = ctypes.CDLL(None)
# keeps the interpreter lock during a call that never waits: otherwise a busy thread may take it for 5 ms
_fcntl = ctypes.PyDLL(None, use_errno=True).fcntl
_fcntl.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_char_p)
_statx = getattr(ctypes.PyDLL(None, use_errno=True), "statx", None)  # of Linux 4.11 and glibc 2.28
_EMPTY_PATH, _MODIFIED_AND_SIZE = 0x1000, 0x240
_STATX_BYTES, _STATX_SIZE, _STATX_MODIFIED = 256, struct.Struct("@40xQ"), struct.Struct("@112xqI")
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14


class Memory:
    """A file of an arena, mapped whole.

    Attributes:
        view: the whole file as bytes.
        address: address of its first byte.
        committed: number of bytes from its start that have memory.
    """

    def __init__(self, fd: int, nbytes: int, committed: int) -> None:
        self.fd, self.committed = fd, committed
        self.map = mmap.mmap(fd, nbytes)
        self.view = memoryview(self.map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    def commit(self, upto: int) -> None:
        """Allocate memory up to an offset, and touch it, so that the first message is as fast as later ones.

        Raises:
            OSError: ENOSPC, the file system is full; nothing has changed.
        """
        if upto <= self.committed:
            return
        start, length = self.committed, upto - self.committed
        os.posix_fallocate(self.fd, start, length)
        self.touch(start, length)
        self.committed = upto

    def touch(self, start: int, nbytes: int) -> None:
        """Map allocated memory of whole pages, so that no message waits for it at its first use."""
        # mmap.madvise would keep the interpreter lock; older kernels refuse it, and map pages on first use
        _libc.madvise(ctypes.c_void_p(self.address + start), ctypes.c_size_t(nbytes), _POPULATE_WRITE)

    def close(self) -> None:
        """Close the file; it is unmapped once no view or `Index` uses it any more."""
        self.view.release()
        with contextlib.suppress(BufferError):
            self.map.close()
        os.close(self.fd)


def size_of(fd: int) -> int:
    """Return the size of an open file, without releasing the interpreter lock."""
    found = _stat(fd)
    return os.fstat(fd).st_size if found is None else int(_STATX_SIZE.unpack_from(found)[0])


def modified_ns(fd: int) -> int:
    """Return when an open file was modified, without releasing the interpreter lock."""
    found = _stat(fd)
    if found is None:
        return os.fstat(fd).st_mtime_ns
    seconds, nanoseconds = _STATX_MODIFIED.unpack_from(found)
    return int(seconds) * 10**9 + int(nanoseconds)


def _stat(fd: int) -> ctypes.Array[ctypes.c_char] | None:
    """Return Linux's `struct statx` of an open file; None where it must be asked for in another way."""
    if _statx is None:
        return None
    found = ctypes.create_string_buffer(_STATX_BYTES)
    return None if _statx(fd, b"", _EMPTY_PATH, _MODIFIED_AND_SIZE, found) else found


class ByteLocks:
    """Locks of single bytes of a file, which exclude other processes, by the kernel, and other threads of this one.

    Acquiring never waits, because a process may be stopped while it holds a lock.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._mutex = threading.Lock()

    def acquire(self, at: int) -> bool:
        """Acquire the lock of byte ``at``; return False if it is held."""
        if not self._mutex.acquire(blocking=False):
            return False
        if not _fcntl(self._fd, _SETLK, _FLOCK.pack(_WRLCK, 0, at, 1, 0)):
            return True
        self._mutex.release()
        if (number := ctypes.get_errno()) in (errno.EAGAIN, errno.EACCES):
            return False
        raise OSError(number, os.strerror(number))

    def release(self, at: int) -> None:
        """Release the lock of byte ``at``."""
        _fcntl(self._fd, _SETLK, _FLOCK.pack(_UNLCK, 0, at, 1, 0))
        self._mutex.release()


def open_private(path: Path) -> int | None:
    """Return a descriptor of another process's file in this arena; None if it was removed meanwhile."""
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
