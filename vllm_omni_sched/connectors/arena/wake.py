"""Wake-up of sleeping receivers: words in a file that all processes of an arena map, and the kernel's futexes on them.

A sender changes the word of an edge after it has shown a message, and wakes who sleeps on it. Nothing relies on it: a
sender that dies in between, or two senders that change a word at once, cost a receiver the rest of its pause.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import platform
import secrets
import zlib
from functools import lru_cache
from pathlib import Path

from vllm_omni_sched.connectors.arena import meeting
from vllm_omni_sched.connectors.arena.memory import open_private
from vllm_omni_sched.connectors.edge import Edge, name_of

WORDS = 1024
"""Number of words; edges that share one wake each other's receivers, which look and sleep again."""
FILE = f"words{meeting.WAKE}"
_CALL = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}.get(platform.machine())
_WAIT, _WAKE, _ALL = 0, 1, 0x7FFFFFFF  # of linux/futex.h; the words are shared by processes
_SIGNATURE = (ctypes.c_long, ctypes.c_void_p, ctypes.c_long, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_void_p)
# waking never waits, and so keeps the interpreter lock: otherwise a busy thread may take it for 5 ms
_keeping, _releasing = ctypes.PyDLL(None, use_errno=True).syscall, ctypes.CDLL(None).syscall
_keeping.argtypes = _releasing.argtypes = _SIGNATURE


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64))


class WakeWords:
    """Words of one arena. Usable as long as it is referenced, by any thread; there is nothing to close.

    Raises:
        OSError: no memory for the file, or this system has no futexes.
    """

    def __init__(self, directory: Path) -> None:
        if _CALL is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        fd = _open(directory)
        try:
            if not meeting.is_private(fd) or os.fstat(fd).st_size != 4 * WORDS:
                raise OSError(errno.EPERM, os.strerror(errno.EPERM))
            self._map = mmap.mmap(fd, 4 * WORDS)
        finally:
            os.close(fd)
        self._words = memoryview(self._map).cast("I")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        if _keeping(_CALL, self._address, _WAKE, 0, None, None) < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def value(self, word: int) -> int:
        """Return the current value of a word, for `wait`."""
        return self._words[word]

    def wake(self, word: int) -> None:
        """Change a word, and wake all who sleep on it."""
        self._words[word] = (self._words[word] + 1) & 0xFFFFFFFF
        _keeping(_CALL, self._address + 4 * word, _WAKE, _ALL, None, None)

    def wait(self, word: int, value: int, seconds: float) -> None:
        """Sleep until a word is woken, at most ``seconds``; return at once if it no longer has that value."""
        whole = int(seconds)
        limit = _Timespec(whole, int((seconds - whole) * 1e9))
        _releasing(_CALL, self._address + 4 * word, _WAIT, value, ctypes.byref(limit), None)


def _open(directory: Path) -> int:
    """Return a descriptor of the file, which appears complete when the first process needs it."""
    path = directory / FILE
    if (fd := open_private(path)) is not None:
        return fd
    unfinished = directory / f"{secrets.token_hex(8)}{meeting.UNFINISHED}"
    os.close(meeting.create(unfinished, 4 * WORDS))
    try:
        with contextlib.suppress(FileExistsError):
            os.link(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)


def wake_words(directory: Path) -> WakeWords | None:
    """Return the words of an arena; None where there can be none, so that receivers poll."""
    with contextlib.suppress(OSError):
        return WakeWords(directory)
    return None


@lru_cache(maxsize=1024)
def word_of(edge: Edge) -> int:
    """Return the word of an edge, the same in all processes."""
    return zlib.crc32(name_of(edge, "")) % WORDS
