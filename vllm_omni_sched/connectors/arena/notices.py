"""Files in an arena's directory that announce something while their makers live, and their readers."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from vllm_omni_sched.clock import Clock
from vllm_omni_sched.connectors.arena import meeting

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
    """The names in a directory, read again when it has changed."""

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
