"""A link of a given speed: a token bucket in front of a socket of the loopback."""

from __future__ import annotations

import socket
import struct
import time

CHUNK = 64 << 10
SLACK = 1e-3
"""Seconds that the bucket holds: what a sleep that ended late is made up for by."""
LENGTH = struct.Struct("<Q")


class Link:
    """Sends messages no faster than ``bytes_per_second``, of what is sent: lengths count, too."""

    def __init__(self, sock: socket.socket, bytes_per_second: float) -> None:
        self._socket, self._seconds_per_byte, self._free_at = sock, 1 / bytes_per_second, 0.0

    def send(self, data: bytes | bytearray) -> None:
        """Return when all of it is on its way."""
        self._paced(LENGTH.pack(len(data)))
        left = memoryview(data)
        while left:
            self._paced(left[:CHUNK])
            left = left[CHUNK:]

    def _paced(self, piece: bytes | memoryview) -> None:
        now = time.perf_counter()
        self._free_at = max(self._free_at, now - SLACK) + len(piece) * self._seconds_per_byte
        self._socket.sendall(piece)
        if self._free_at > now:
            time.sleep(self._free_at - now)


def receive(sock: socket.socket) -> bytearray | None:
    """Return the next message, or None after the last one."""
    front = _exactly(sock, LENGTH.size)
    return None if front is None else _exactly(sock, LENGTH.unpack(front)[0])


def _exactly(sock: socket.socket, nbytes: int) -> bytearray | None:
    data = bytearray(nbytes)
    view = memoryview(data)
    while view:
        got = sock.recv_into(view)
        if not got:
            return None
        view = view[got:]
    return data
