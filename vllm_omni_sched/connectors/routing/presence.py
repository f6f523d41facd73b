"""Stages on this host, as their processes announce them in the arena's directory."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import os
import secrets
from pathlib import Path

from vllm_omni_sched.clock import Clock, monotonic_seconds
from vllm_omni_sched.config.errors import RendezvousError
from vllm_omni_sched.connectors.arena import meeting

CHECK_EVERY = 1.0
"""Seconds after which announced processes are checked again, because they may have died."""


class Presence:
    """Stages of one arena, by files that hold a lock as long as their process lives.

    1. A stage is here when each of its replicas has a living process here: numbers from 0 on without a gap, and as many
       as are expected. A replica elsewhere could be the one that a message is for.
    2. An announcement counts only on the host where it was made, even if other hosts see the directory.
    3. The directory is listed again only when it has changed, or to find dead processes.

    Args:
        directory: directory of the arena.
        host: name of this host; None: the boot id of its kernel.

    Attributes:
        listings: how often the directory was listed.
    """

    def __init__(self, directory: Path, clock: Clock = monotonic_seconds, host: str | None = None) -> None:
        self._directory, self._clock = directory, clock
        self._host = _short(_boot_id() if host is None else host)
        self._announced: list[tuple[Path, int]] = []
        self._pid = os.getpid()
        self._listing, self._listed_at = meeting.Listing(directory, clock), 0.0
        self._replicas: dict[str, set[int]] = {}  # by digest of a stage: those with a living process here
        self.listings = 0

    def announce(self, stage: str, replica: int = 0) -> None:
        """Announce that this process serves ``stage``, until it ends or `close`.

        Raises:
            RendezvousError: the announcement cannot be written.
        """
        name = f"{_short(stage)}-{replica}-{self._host}-{secrets.token_hex(4)}"
        path = self._directory / f"{name}{meeting.STAGE}"
        try:
            self._announced.append((path, meeting.post(path)))
        except OSError as error:
            raise RendezvousError(f"cannot announce stage {stage} in {self._directory}: {error.strerror}") from error

    def is_here(self, stage: str, replicas: int = 1) -> bool:
        """Return whether all replicas of a stage are on this host; ``replicas``: least number of replicas anywhere."""
        self._look()
        here = self._replicas.get(_short(stage), set())
        return len(here) >= replicas and here == set(range(len(here)))

    def close(self) -> None:
        """Remove the announcements; does nothing in a forked child, because they are its parent's."""
        announced, self._announced = self._announced, []
        if os.getpid() != self._pid:
            return
        for path, life in announced:
            meeting.take_away(path, life)

    def _look(self) -> None:
        now = self._clock()
        try:
            names = self._listing.names(again=now - self._listed_at >= CHECK_EVERY)
        except OSError:  # the directory was removed: no process is announced
            names, self._listed_at = [], -math.inf
        else:
            if names is None:
                return
            self._listed_at = now
            self.listings += 1
        self._replicas = {}
        for name in names:
            parts = name.removesuffix(meeting.STAGE).split("-")
            if not name.endswith(meeting.STAGE) or len(parts) != 4 or not parts[1].isdecimal():
                continue
            stage, replica, host, _ = parts
            if host == self._host and meeting.is_alive(self._directory / name):
                self._replicas.setdefault(stage, set()).add(int(replica))


def _short(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


@functools.cache
def _boot_id() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return os.uname().nodename
