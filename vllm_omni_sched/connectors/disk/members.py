"""Processes that share a directory of messages, and cleanup after dead ones."""

from __future__ import annotations

import hashlib
import itertools
import os
import secrets
import threading
from pathlib import Path
from typing import Any

from vllm_omni_sched.clock import Clock
from vllm_omni_sched.connectors.arena import meeting
from vllm_omni_sched.connectors.disk import files
from vllm_omni_sched.connectors.disk.files import LIFE, MESSAGE, TAKEN, TAKEN_TICKET, TICKET, UNFINISHED


class Members:
    """Membership of this process in a directory of messages; the process is alive as long as it holds a file's lock.

    ::

        <token>.life                      a process
        <digest>.msg                      a message that waits
        <digest>.<token>.<number>.new     one that is being written by that process
        <digest>.<token>.<number>.got     one that is being read by it, or leased to it
        <id>.move, <id>.moved             see `connectors.tiers.duplicates`

    Raises:
        OSError: nothing can be written there.
    """

    def __init__(self, directory: Path, clock: Clock, ttl_seconds: float) -> None:
        self.directory, self._clock, self._ttl_seconds = directory, clock, ttl_seconds
        while True:
            self.number = secrets.randbits(32)
            self.path = self.file_of(self.number)
            try:
                os.close(meeting.create(self.path, 0))
                break
            except FileExistsError:
                continue
        self._life = [meeting.live(self.path)]
        self._names = itertools.count()
        self._sweeping = threading.Lock()
        self._senders: dict[str, tuple[files.Stamp, int]] = {}  # of messages that wait, by file
        self.counts = {"given_back": 0, "orphans_expired": 0}

    def file_of(self, number: int) -> Path:
        """Return the lock file of a process."""
        return self.directory / f"{number:08x}{LIFE}"

    def is_alive(self, number: int) -> bool:
        """Return whether that process is alive."""
        return number == self.number or meeting.is_alive(self.file_of(number))

    def message(self, name: bytes) -> Path:
        """Return the path of a waiting message."""
        return self.directory / f"{digest_of(name)}{MESSAGE}"

    def own_file(self, name: bytes, kind: str) -> Path:
        """Return an unused path for a file of this process alone."""
        return self.directory / f"{digest_of(name)}.{self.number:08x}.{next(self._names)}{kind}"

    def sweep(self) -> int:
        """Give back messages of dead processes, and remove unreachable and expired ones; return how many."""
        if not self._sweeping.acquire(blocking=False):
            return 0
        try:
            return self._sweep()
        finally:
            self._sweeping.release()

    def facts(self) -> dict[str, Any]:
        return dict(self.counts)

    def close(self) -> None:
        """Leave the directory."""
        for life in self._life:
            self.path.unlink(missing_ok=True)
            meeting.let_go(life)
        self._life.clear()

    def _sweep(self) -> int:
        done, now, alive = 0, self._clock(), dict[int, bool]()
        seen: dict[str, tuple[files.Stamp, int]] = {}

        def lives(number: int) -> bool:
            if number not in alive:
                alive[number] = self.is_alive(number)
            return alive[number]

        for entry in sorted(os.listdir(self.directory)):
            path = self.directory / entry
            parts = entry.split(".")
            kind = f".{parts[-1]}"
            if kind == MESSAGE:
                stamp = files.stamp_of(path)
                known = self._senders.get(entry)
                if stamp is None:
                    continue
                if known is None or known[0] != stamp:
                    known = stamp, (files.generation_in(path) or 0) >> 32
                seen[entry] = known
                # twice the limit if its sender lives, which does not know that it was given back
                age = now - stamp.put_at_ns / 1e9
                if age > self._ttl_seconds and (not lives(known[1]) or age > 2 * self._ttl_seconds):
                    done += self._expire(path, stamp)
            elif kind in (UNFINISHED, TAKEN) and len(parts) == 4 and not lives(_number(parts[1])):
                if kind == TAKEN and files.rename_if_free(path, self.directory / f"{parts[0]}{MESSAGE}"):
                    self.counts["given_back"] += 1
                path.unlink(missing_ok=True)  # unfinished, or replaced meanwhile
                done += 1
            elif kind in (TICKET, TAKEN_TICKET):
                done += self._sweep_ticket(path, now)
            elif kind == LIFE and not lives(_number(parts[0])):
                path.unlink(missing_ok=True)
        self._senders = seen
        return done

    def _sweep_ticket(self, path: Path, now: float) -> bool:
        """Remove a dead process's ticket once no copy of its message can be left; return whether it was removed."""
        if path.suffix == TAKEN_TICKET:
            over = not path.with_suffix(TICKET).exists()
        else:
            stamp = files.stamp_of(path)
            over = (
                stamp is not None and now - stamp.put_at_ns / 1e9 > 2 * self._ttl_seconds and not self._has_mover(path)
            )
        if over:
            path.unlink(missing_ok=True)
        return over

    def _has_mover(self, ticket: Path) -> bool:
        try:
            return self.is_alive(_number(ticket.read_text()))
        except FileNotFoundError:
            return True

    def _expire(self, path: Path, stamp: files.Stamp) -> bool:
        taken = path.with_suffix(f".{self.number:08x}.{next(self._names)}{TAKEN}")
        try:
            os.rename(path, taken)
        except FileNotFoundError:
            return False
        if files.stamp_of(taken) != stamp:  # put anew meanwhile
            files.rename_if_free(taken, path)
            return False
        taken.unlink()
        self.counts["orphans_expired"] += 1
        return True


def digest_of(name: bytes) -> str:
    """Return the file name for a message's name. A receiver compares the name in the message."""
    return hashlib.blake2b(name, digest_size=16).hexdigest()


def _number(text: str) -> int:
    try:
        return int(text, 16)
    except ValueError:
        return 0
