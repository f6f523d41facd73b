"""Network namespaces: a thread that is inside one makes threads, sockets and processes there."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

NEW_NETWORK = 0x40000000  # CLONE_NEWNET
HERE = "/proc/thread-self/ns/net"
_libc = ctypes.CDLL(None, use_errno=True)


class Namespace:
    """A network namespace with loopback and nothing else.

    Raises:
        OSError: we may not make one.
    """

    def __init__(self) -> None:
        with _back_where_we_were():
            _check(_libc.unshare(NEW_NETWORK))
            self._fd = os.open(HERE, os.O_RDONLY | os.O_CLOEXEC)
            ip("link", "set", "lo", "up")

    @contextmanager
    def inside(self) -> Iterator[None]:
        """This thread, and what it starts, is in there meanwhile."""
        with _back_where_we_were():
            _check(_libc.setns(self._fd, NEW_NETWORK))
            yield

    def link(self, other: Namespace, ours: str, theirs: str) -> None:
        """Connect two namespaces: device ``link0`` at both ends, with these addresses."""
        with self.inside():
            far_end = f"/proc/{os.getpid()}/fd/{other._fd}"
            ip("link", "add", "link0", "type", "veth", "peer", "name", "link0", "netns", far_end)
        for end, address in ((self, ours), (other, theirs)):
            with end.inside():
                ip("addr", "add", f"{address}/24", "dev", "link0")
                ip("link", "set", "link0", "up")

    def set_link(self, state: str) -> None:
        """Set the link ``up`` or ``down``."""
        with self.inside():
            ip("link", "set", "link0", state)

    def close(self) -> None:
        """Close the descriptor of the namespace, which ends with the last process in it."""
        os.close(self._fd)


@cache
def home() -> Namespace:
    """Return the one namespace of this process: the library's first threads stay in it and serve all."""
    return Namespace()


def move_to(descriptor: int) -> None:
    """Move this thread, and what it starts, to the network namespace of a descriptor, unless it is there."""
    if os.fstat(descriptor).st_ino != os.stat(HERE).st_ino:
        _check(_libc.setns(descriptor, NEW_NETWORK))


def ip(*arguments: str) -> None:
    """Run the command `ip` where this thread is."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@contextmanager
def _back_where_we_were() -> Iterator[None]:
    before = os.open(HERE, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield
    finally:
        _check(_libc.setns(before, NEW_NETWORK))
        os.close(before)


def _check(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
