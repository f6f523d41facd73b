"""The store of encodings that the engines of a host share: a directory in memory for all engines of one user.

It holds bytes by key, each key once, whoever made it. Depends on neither vLLM nor torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from vllm_omni_sched.connectors.arena import meeting

_ENCODING, _CLAIM, _PIN, _UNFINISHED, _LIFE, _LOCK = ".enc", ".claim", ".pin", ".new", ".life", "lock"
_TEN_YEARS_NS = 10 * 365 * 24 * 3600 * 10**9


class ClaimOutcome(Enum):
    """What became of a claim; each is also the label of a metric."""

    OURS = "ours"
    """Every key is in the store or claimed by this member: whoever asked is to make the rest."""

    OTHERS = "others"
    """Another living member makes one of them; nothing was claimed."""


class PutOutcome(Enum):
    """What became of an encoding that was offered to the store; each is also the label of a metric."""

    STORED = "stored"
    KNOWN = "known"
    TOO_LARGE = "too_large"
    NO_ROOM = "no_room"
    FAILED = "failed"  # it could not be copied from its device


@dataclass(frozen=True)
class StoreUse:
    """Encodings in the store, and the bytes that they and pinned ones take."""

    encodings: int
    num_bytes: int


class EncodingStore:
    """Keeps encodings for all engines of this user that enter the same space.

    1. A key has at most one encoding. It appears complete or not at all, and is never changed.
    2. `claim` takes all of its keys or none, so that no member holds one while it waits for another. A claim ends
       with `put`, with `release`, or with the process that made it.
    3. `pin` keeps an encoding readable until `unpin`, also when it is evicted meanwhile.
    4. `put` evicts what was used longest ago until the rest fits into ``max_bytes``. Pinned encodings stay, and count.
    5. What a dead process leaves, its claims, pins and unfinished files, is removed by the next member that enters,
       puts, or meets it. The last member that leaves removes all.

    ::

        <digest>.enc             an encoding; its time stamp is its last use
        <digest>.claim           somebody makes it; holds the token of that member
        <digest>.<token>.pin     a second name of the encoding, for one member
        <digest>.<token>.new     it is being written
        <token>.life             a member, alive as long as it holds the lock

    Args:
        root: folder of a file system in memory.
        space: name of what is shared; encodings of different models must not meet.
        max_bytes: bound on all encodings of the space, in bytes.
        ttl_seconds: an encoding that nobody has used for so long is removed when the next one is put.

    Raises:
        RendezvousError: the directory cannot be made, or is not private to this user.
    """

    def __init__(self, root: str, space: str, *, max_bytes: int, ttl_seconds: float) -> None:
        self.max_bytes, self._ttl_ns = max_bytes, min(int(ttl_seconds * 1e9), _TEN_YEARS_NS)
        self.directory, self._entered = meeting.enter(root, space)
        while True:
            self.token = secrets.token_hex(8)
            life = self.directory / f"{self.token}{_LIFE}"
            try:
                os.close(meeting.create(life, 0))
                break
            except FileExistsError:
                continue
        self._life, self._life_path, self._open = meeting.live(life), life, True
        with contextlib.suppress(OSError), self._locked():
            self._sweep()

    # -- reading -----------------------------------------------------------

    def has(self, key: str) -> bool:
        """Return whether the encoding can be read now."""
        return self._path(key, _ENCODING).exists()

    def pin(self, key: str) -> bool:
        """Keep the encoding readable for this member; return False if there is none."""
        path = self._path(key, _ENCODING)
        try:
            with contextlib.suppress(FileExistsError):
                os.link(path, self._own(key, _PIN))
            os.utime(path)
        except OSError:  # evicted, by rule 4, or removed by hand
            return self._own(key, _PIN).exists()
        return True

    def unpin(self, key: str) -> None:
        """Give up what `pin` keeps."""
        self._own(key, _PIN).unlink(missing_ok=True)

    def read(self, key: str, member: str | None = None, *, most: int = -1) -> bytes:
        """Return an encoding that a member has pinned.

        Args:
            key: of the encoding.
            member: token of that member; by default this one.
            most: bytes to read, from its beginning; all if below 0.

        Raises:
            KeyError: it is not pinned by that member.
            OSError: the file cannot be read.
        """
        try:
            with self.directory.joinpath(f"{_digest(key)}.{member or self.token}{_PIN}").open("rb") as file:
                return file.read(most)
        except FileNotFoundError:
            raise KeyError(key) from None

    def remove(self, key: str) -> None:
        """Remove an encoding that nobody can use; who has pinned it can still read it."""
        self._path(key, _ENCODING).unlink(missing_ok=True)

    # -- making ------------------------------------------------------------

    def claim(self, keys: Sequence[str]) -> ClaimOutcome:
        """Take it on to make those of these encodings that the store lacks, unless another member makes one of them."""
        made: list[Path] = []
        try:
            with self._locked():
                for key in keys:
                    path = self._path(key, _CLAIM)
                    if self.has(key):
                        continue
                    owner = _content(path)
                    if owner is not None and owner != self.token:
                        if self._lives(owner):
                            for own in made:
                                own.unlink(missing_ok=True)
                            return ClaimOutcome.OTHERS
                        owner = None
                    if owner is None:
                        path.unlink(missing_ok=True)  # of a member that died before it had written its token
                        self._write_claim(path)
                        made.append(path)
        except OSError:  # no room or no descriptors for a claim: the encoding is made without one
            for own in made:
                own.unlink(missing_ok=True)
        return ClaimOutcome.OURS

    def release(self, key: str) -> None:
        """Give up this member's claim, if it has one."""
        path = self._path(key, _CLAIM)
        with contextlib.suppress(OSError), self._locked():
            if _content(path) == self.token:
                path.unlink(missing_ok=True)

    def put(self, key: str, data: bytes) -> PutOutcome:
        """Store an encoding and end the claim on it, whoever made that; the claim ends also if it cannot be stored."""
        try:
            return self._put(key, data)
        finally:
            self.end_claim(key)

    def end_claim(self, key: str) -> None:
        """End the claim on an encoding, whoever made it: the encoding is there, or will not come."""
        self._path(key, _CLAIM).unlink(missing_ok=True)

    def _put(self, key: str, data: bytes) -> PutOutcome:
        if len(data) > self.max_bytes:
            return PutOutcome.TOO_LARGE
        path, unfinished = self._path(key, _ENCODING), self._own(key, _UNFINISHED)
        try:
            with self._locked():  # not longer than the memory is set aside: schedulers wait for this lock
                if path.exists():
                    os.utime(path)
                    return PutOutcome.KNOWN
                self._sweep()
                if not self._make_room(len(data)):
                    return PutOutcome.NO_ROOM
                fd = meeting.create(unfinished, len(data))
            with open(fd, "r+b", buffering=0) as file:
                rest = memoryview(data)
                while rest:
                    rest = rest[file.write(rest) :]
            unfinished.rename(path)
        except OSError:  # the file system is full, or the directory was removed by hand
            unfinished.unlink(missing_ok=True)
            return PutOutcome.NO_ROOM
        return PutOutcome.STORED

    # -- care --------------------------------------------------------------

    def use(self) -> StoreUse:
        """Return what is in the store now."""
        files = self._encodings()
        return StoreUse(sum(one.is_stored for one in files.values()), sum(one.num_bytes for one in files.values()))

    @property
    def is_open(self) -> bool:
        """Return whether this member has not left yet."""
        return self._open

    def close(self) -> None:
        """Give up all claims and pins of this member, and leave; the last member removes the store."""
        if not self._open:
            return
        self._open = False
        with contextlib.suppress(OSError), self._locked():
            self._remove_of(self.token)
        self._life_path.unlink(missing_ok=True)
        meeting.let_go(self._life)
        meeting.leave(self.directory, self._entered)

    def _make_room(self, num_bytes: int) -> bool:
        """Evict by rule 4; return whether so many bytes fit then."""
        files = self._encodings()
        left = self.max_bytes - sum(one.num_bytes for one in files.values())
        now_ns = self._now_ns()
        for one in sorted((one for one in files.values() if one.is_stored), key=lambda one: one.used_ns):
            if left >= num_bytes and now_ns - one.used_ns < self._ttl_ns:
                break
            if not one.is_pinned:
                one.path.unlink(missing_ok=True)
                left += one.num_bytes
        return left >= num_bytes

    def _encodings(self) -> dict[int, _File]:
        """Return the files of encodings by inode, so that the names of one file count once."""
        found: dict[int, _File] = {}
        with os.scandir(self.directory) as entries:
            for entry in entries:
                kind = os.path.splitext(entry.name)[1]
                if kind not in (_ENCODING, _PIN, _UNFINISHED):
                    continue
                try:
                    facts = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                one = found.setdefault(facts.st_ino, _File(Path(entry.path), facts.st_size, facts.st_mtime_ns))
                one.is_pinned |= kind != _ENCODING
                if kind == _ENCODING:
                    one.is_stored, one.path = True, Path(entry.path)
        return found

    def _sweep(self) -> None:
        """Remove what dead members left. The lock is held."""
        for life in list(self.directory.glob(f"*{_LIFE}")):
            if life != self._life_path and not meeting.is_alive(life):
                self._remove_of(life.stem)
                life.unlink(missing_ok=True)

    def _remove_of(self, token: str) -> None:
        for path in list(self.directory.glob(f"*.{token}.*")):
            path.unlink(missing_ok=True)
        for path in list(self.directory.glob(f"*{_CLAIM}")):
            if _content(path) == token:
                path.unlink(missing_ok=True)

    def _write_claim(self, path: Path) -> None:
        fd = meeting.create(path, 0)
        with open(fd, "wb", buffering=0) as file:
            file.write(self.token.encode())

    def _lives(self, token: str) -> bool:
        return token == self.token or meeting.is_alive(self.directory / f"{token}{_LIFE}")

    def _now_ns(self) -> int:
        """Return the file system's time, by which uses of encodings are stamped."""
        os.utime(self._life_path)
        return self._life_path.stat().st_mtime_ns

    def _path(self, key: str, kind: str) -> Path:
        return self.directory / f"{_digest(key)}{kind}"

    def _own(self, key: str, kind: str) -> Path:
        return self.directory / f"{_digest(key)}.{self.token}{kind}"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of the store, which the kernel releases however this process ends.

        Raises:
            OSError: the directory was removed, or this process has no descriptor left.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self.directory / _LOCK, flags, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


@dataclass
class _File:
    path: Path
    num_bytes: int
    used_ns: int
    is_stored: bool = False
    is_pinned: bool = False


def _digest(key: str) -> str:
    return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()


def _content(claim: Path) -> str | None:
    """Return the token in a claim; None without one."""
    try:
        return claim.read_text() or None
    except FileNotFoundError:
        return None
