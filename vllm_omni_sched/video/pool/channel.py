"""Messages between the owner of decoders and their processes: small, typed, with descriptors of shared memory.

A process that reads untrusted bytes may be compromised. Therefore nothing is unpickled, every message is checked
against its type, and large data is sent as a memory file without a name.
"""

from __future__ import annotations

import contextlib
import os
import socket
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

INLINE_BYTES = 1 << 16  # fits into a socket's buffer with any system settings
MAX_BYTES = 1 << 28
_MAX_FDS = 4


class Channel:
    """Sends and receives messages at one end of a channel.

    Args:
        end: one socket of a SOCK_SEQPACKET socket_pair.
        decoder: decoder of the messages that are accepted.
    """

    def __init__(self, end: socket.socket, decoder: msgspec.msgpack.Decoder[Any]) -> None:
        self.end, self._decoder = end, decoder

    def fileno(self) -> int:
        return self.end.fileno()

    def send(self, message: Any, fds: Sequence[int] = (), *, wait: bool = False) -> None:
        """Send a message; descriptors are duplicated, and stay open here.

        Raises:
            OSError: the other side has closed the channel, or does not read.
        """
        data = msgspec.msgpack.encode(message)
        with contextlib.ExitStack() as stack:
            head, all_fds = b"\0" + data, [*fds]
            if len(data) > INLINE_BYTES:
                bulk = stack.enter_context(closing_fd(memory_file("omni-sched-message", data)))
                head, all_fds = b"\1", [bulk, *fds]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", all_fds))] if all_fds else []
            self.end.sendmsg([head], rights, socket.MSG_NOSIGNAL | (0 if wait else socket.MSG_DONTWAIT))

    def receive(self, *, wait: bool = False) -> tuple[Any, list[int]] | None:
        """Return the next message and its descriptors, which the caller must close; None if there is none yet.

        Raises:
            EOFError: the other side has closed the channel.
            ValueError: the message is not an accepted one; its descriptors are closed.
        """
        flags = socket.MSG_CMSG_CLOEXEC | (0 if wait else socket.MSG_DONTWAIT)
        try:
            head, rights, _, _ = self.end.recvmsg(INLINE_BYTES + 1, socket.CMSG_SPACE(4 * _MAX_FDS), flags)
        except BlockingIOError:
            return None
        except OSError:
            raise EOFError from None
        fds = array("i")
        for level, kind, data in rights:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        if not head:
            close_all(fds)
            raise EOFError
        with contextlib.ExitStack() as undo:
            undo.callback(close_all, list(fds))
            body: bytes = head[1:]
            if head[0]:
                if not fds:
                    raise ValueError("a large message came without its memory file")
                body = read_all(fds[0], MAX_BYTES)
            message = self._decoder.decode(body)
            undo.pop_all()
        if head[0]:
            os.close(fds.pop(0))
        return message, list(fds)

    def close(self) -> None:
        self.end.close()


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a channel that preserves message boundaries."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def memory_file(name: str, *parts: bytes | memoryview) -> int:
    """Return the descriptor of a new memory file with these parts.

    Raises:
        OSError: no memory or no descriptor is left.
    """
    fd = os.memfd_create(name)
    try:
        for part in parts:
            left = memoryview(part).cast("B")
            while left:
                left = left[os.write(fd, left) :]
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_all(fd: int, most: int) -> bytes:
    """Return the content of a memory file.

    Raises:
        ValueError: it is larger than ``most`` bytes, or becomes shorter meanwhile.
    """
    nbytes = os.fstat(fd).st_size
    if nbytes > most:
        raise ValueError(f"a message has {nbytes} bytes, but only {most} are allowed")
    data = os.pread(fd, nbytes, 0)
    if len(data) != nbytes:
        raise ValueError("a message is shorter than its memory file was")
    return data


@contextlib.contextmanager
def closing_fd(fd: int) -> Iterator[int]:
    """Close the descriptor at the end of the block."""
    try:
        yield fd
    finally:
        os.close(fd)


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)
