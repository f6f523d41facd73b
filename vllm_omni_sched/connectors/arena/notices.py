"""Files in the directory of an arena that say something as long as their makers live, and who reads them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from vllm_omni_sched.clock import Clock
from vllm_omni_sched.connectors.arena import meeting

SETTLES = 0.05
"""Seconds: a directory may change again within the tick of its time stamp."""


def post(path: Path, content: bytes = b"") -> int:
    """Make a private file that is seen whole, and locked from then on; the descriptor that `take_away` wants.

    Raises:
        OSError: no room, no descriptors, or the directory has gone; nothing is left of it.
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
    """Say it no longer."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
    meeting.let_go(life)


class Listing:
    """The names in a directory, read again when it has changed."""

    def __init__(self, directory: Path, clock: Clock) -> None:
        self._directory, self._clock = directory, clock
        self._stamp, self._changed_at = -1, 0.0

    def names(self, again: bool = False) -> list[str] | None:
        """All of them; None where they are what they were, unless they are to be read ``again``.

        Raises:
            OSError: it cannot be read; the next call tries that again.
        """
        stamp, now = os.stat(self._directory).st_mtime_ns, self._clock()
        if not again and stamp == self._stamp and now - self._changed_at > SETTLES:
            return None
        names = os.listdir(self._directory)
        if stamp != self._stamp:
            self._stamp, self._changed_at = stamp, now
        return names
