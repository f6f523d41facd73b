"""Announcements of receivers' devices and of living senders: files in the arena, each locked while its maker lives.

A receiver announces which devices it can open for each edge on which it receives. A sender reads this before it sends a
handle.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path

import msgspec

from vllm_omni_sched.clock import Clock
from vllm_omni_sched.connectors.arena import meeting
from vllm_omni_sched.connectors.edge import Edge, name_of

SEES, SHARES = ".sees", ".shares"
MAX_BYTES = 1 << 16

_decode = msgspec.msgpack.Decoder(list[str]).decode


class Board:
    """Announcements of one process in an arena's directory; callers hold the lock of `CudaIpcTransport`."""

    def __init__(self, directory: Path, clock: Clock) -> None:
        self._directory, self._listing = directory, meeting.Listing(directory, clock)
        self._posted: dict[Edge, tuple[frozenset[str], Path, int]] = {}
        self._own: tuple[Path, int] | None = None
        self._found: dict[str, frozenset[str]] = {}  # content of other processes' announcements, by file name

    def post(self, edge: Edge, devices: frozenset[str]) -> None:
        """Announce the devices that this process can open for an edge, in place of its earlier announcement.

        Raises:
            OSError: no room, no descriptors, or the directory has gone.
        """
        before = self._posted.get(edge)
        if before is not None and before[0] == devices:
            return
        path, life = self._make(_digest(edge), SEES, msgspec.msgpack.encode(sorted(devices)))
        self._posted[edge] = (devices, path, life)
        if before is not None:
            meeting.take_away(before[1], before[2])

    def receivers(self, edge: Edge) -> list[frozenset[str]]:
        """Return the devices that each living receiver of an edge can open.

        Raises:
            OSError: the directory cannot be read.
        """
        self._list()
        prefix = _digest(edge)
        names = [name for name in self._found if name.startswith(prefix)]
        return [self._found[name] for name in names if meeting.is_alive(self._directory / name)]

    def token(self) -> str:
        """Return the name of this process as a sender, which is announced as long as it lives.

        Raises:
            OSError: see `post`.
        """
        if self._own is None:
            self._own = self._make("sender", SHARES, b"")
        return self._own[0].stem

    def is_alive(self, token: str) -> bool:
        """Return whether the sender of that name is alive."""
        return token.isascii() and "/" not in token and meeting.is_alive(self._directory / f"{token}{SHARES}")

    def tidy(self) -> None:
        """Remove announcements of dead processes."""
        for path in (*self._directory.glob(f"*{SEES}"), *self._directory.glob(f"*{SHARES}")):
            if not meeting.is_alive(path):
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove all announcements of this process."""
        for _, path, life in self._posted.values():
            meeting.take_away(path, life)
        self._posted.clear()
        if self._own is not None:
            meeting.take_away(*self._own)
            self._own = None

    def _make(self, prefix: str, suffix: str, content: bytes) -> tuple[Path, int]:
        path = self._directory / f"{prefix}-{secrets.token_hex(8)}{suffix}"
        return path, meeting.post(path, content)

    def _list(self) -> None:
        names = self._listing.names()
        if names is not None:
            ours = [name for name in names if name.endswith(SEES)]
            self._found = {name: seen for name in ours if (seen := self._read(name)) is not None}

    def _read(self, name: str) -> frozenset[str] | None:
        """Return the devices in an announcement; None if it was removed, and none for a file that is not ours."""
        if name in self._found:
            return self._found[name]
        try:
            fd = os.open(self._directory / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        except OSError:
            return frozenset()
        with os.fdopen(fd, "rb") as file:
            if not meeting.is_private(file.fileno()):
                return frozenset()
            try:
                return frozenset(_decode(file.read(MAX_BYTES)))
            except (msgspec.DecodeError, ValueError):
                return frozenset()


def _digest(edge: Edge) -> str:
    return hashlib.blake2b(name_of(edge, ""), digest_size=16).hexdigest()
