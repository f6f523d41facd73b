"""The store of encodings that engines of one host share."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vllm_omni_sched.config.errors import RendezvousError
from vllm_omni_sched.connectors.encodings import ClaimOutcome, EncodingStore, PutOutcome, StoreUse

Enter = Callable[..., EncodingStore]


@pytest.fixture
def enter(tmp_path: Path) -> Iterator[Enter]:
    entered = []

    def make(space: str = "space", *, max_bytes: int = 1000, ttl_seconds: float = 3600.0) -> EncodingStore:
        entered.append(EncodingStore(str(tmp_path), space, max_bytes=max_bytes, ttl_seconds=ttl_seconds))
        return entered[-1]

    yield make
    for store in entered:
        store.close()
    assert list(tmp_path.iterdir()) == []  # the last member removes all


def _digest(key: str) -> str:
    return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()


def test_what_one_puts_all_can_read(enter: Enter) -> None:
    one, other, elsewhere = enter(), enter(), enter("another")
    assert one.put("key", b"value") is PutOutcome.STORED
    assert other.has("key")
    assert other.pin("key")
    assert other.read("key") == b"value"
    assert one.read("key", other.token) == b"value"
    assert not elsewhere.has("key")
    assert not elsewhere.pin("key")


def test_only_what_is_pinned_can_be_read(enter: Enter) -> None:
    one = enter()
    one.put("key", b"value")
    with pytest.raises(KeyError):
        one.read("key")
    assert one.pin("key")
    assert one.pin("key")
    one.unpin("key")
    with pytest.raises(KeyError):
        one.read("key")


def test_a_key_is_stored_once_and_never_changed(enter: Enter) -> None:
    one, other = enter(), enter()
    assert one.put("key", b"value") is PutOutcome.STORED
    assert other.put("key", b"another") is PutOutcome.KNOWN
    assert one.pin("key")
    assert one.read("key") == b"value"
    assert one.use() == StoreUse(1, 5)


def test_what_was_used_longest_ago_leaves_first(enter: Enter) -> None:
    one = enter(max_bytes=30)
    began = one.directory.stat().st_mtime
    for number, key in enumerate(("a", "b", "c")):
        one.put(key, bytes(10))
        used = began - 100 + number
        os.utime(one.directory / f"{_digest(key)}.enc", (used, used))
    one.pin("a")  # now it is used latest
    one.unpin("a")
    assert one.put("d", bytes(15)) is PutOutcome.STORED
    assert [key for key in "abcd" if one.has(key)] == ["a", "d"]


def test_what_is_pinned_stays_and_counts(enter: Enter) -> None:
    one, other = enter(max_bytes=20), enter(max_bytes=20)
    one.put("a", bytes(15))
    other.pin("a")
    assert one.put("b", bytes(10)) is PutOutcome.NO_ROOM
    assert one.use() == StoreUse(1, 15)
    other.unpin("a")
    assert one.put("b", bytes(10)) is PutOutcome.STORED
    assert not one.has("a")
    assert one.put("c", bytes(21)) is PutOutcome.TOO_LARGE


def test_what_nobody_has_used_for_long_leaves_with_the_next_put(enter: Enter) -> None:
    one = enter(ttl_seconds=60.0)
    one.put("old", b"1")
    os.utime(one.directory / f"{_digest('old')}.enc", (1000, 1000))
    one.put("new", b"2")
    assert not one.has("old")
    assert one.has("new")


def test_a_claim_takes_all_or_nothing(enter: Enter) -> None:
    one, other = enter(), enter()
    one.put("stored", b"1")
    assert one.claim(["stored", "a"]) is ClaimOutcome.OURS
    assert one.claim(["a"]) is ClaimOutcome.OURS  # it has it already
    assert other.claim(["b", "a"]) is ClaimOutcome.OTHERS
    assert one.claim(["b"]) is ClaimOutcome.OURS  # the other has not kept it
    other.release("a")  # not its own
    assert other.claim(["a"]) is ClaimOutcome.OTHERS
    one.release("a")
    assert other.claim(["a"]) is ClaimOutcome.OURS


def test_what_is_put_or_cannot_be_put_is_claimed_no_more(enter: Enter) -> None:
    scheduler, worker, other = enter(), enter(), enter()
    scheduler.claim(["a", "large"])
    assert worker.put("a", b"1") is PutOutcome.STORED
    assert worker.put("large", bytes(2000)) is PutOutcome.TOO_LARGE
    assert other.claim(["a", "large"]) is ClaimOutcome.OURS
    assert other.has("a")


@pytest.mark.parametrize("how", ["killed", "left"])
def test_what_a_member_leaves_is_free_again(enter: Enter, tmp_path: Path, how: str) -> None:
    one = enter(max_bytes=20)
    one.put("pinned", bytes(15))
    program = (
        "import sys; from vllm_omni_sched.connectors.encodings import EncodingStore\n"
        f"store = EncodingStore({str(tmp_path)!r}, 'space', max_bytes=20, ttl_seconds=60.0)\n"
        "store.claim(['a']); store.pin('pinned'); (store.directory / f'x.{store.token}.new').touch()\n"
        "print('there', flush=True); sys.stdin.read(); store.close()"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stdout.readline() == b"there\n"
    assert one.claim(["a"]) is ClaimOutcome.OTHERS
    assert one.put("b", bytes(10)) is PutOutcome.NO_ROOM
    if how == "killed":
        child.send_signal(signal.SIGKILL)
    child.stdin.close()
    child.wait()
    child.stdout.close()
    assert one.claim(["a"]) is ClaimOutcome.OURS
    assert one.put("b", bytes(10)) is PutOutcome.STORED
    assert not list(one.directory.glob("*.new"))


def test_an_empty_claim_of_a_member_that_died_writing_it_is_nobodys(enter: Enter) -> None:
    one = enter()
    (one.directory / f"{_digest('a')}.claim").touch()
    assert one.claim(["a"]) is ClaimOutcome.OURS
    assert (one.directory / f"{_digest('a')}.claim").read_text() == one.token


def test_files_are_private_whatever_the_umask(enter: Enter) -> None:
    before = os.umask(0)
    try:
        one = enter()
        one.put("key", b"value")
        one.claim(["other"])
    finally:
        os.umask(before)
    assert one.directory.stat().st_mode & 0o077 == 0
    assert {path.stat().st_mode & 0o777 for path in one.directory.iterdir() if path.name != "lock"} == {0o600}


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    home = tmp_path / f"vllm-omni-sched-{os.geteuid()}"
    home.mkdir(mode=0o700)
    (home / "space").mkdir()
    (home / "space").chmod(0o755)
    with pytest.raises(RendezvousError, match="not a private directory"):
        EncodingStore(str(tmp_path), "space", max_bytes=1, ttl_seconds=1.0)


def test_a_store_that_was_removed_by_hand_gives_nothing_and_stops_nobody(tmp_path: Path) -> None:
    store = EncodingStore(str(tmp_path), "space", max_bytes=100, ttl_seconds=60.0)
    store.put("a", b"1")
    for path in store.directory.iterdir():
        path.unlink()
    store.directory.rmdir()
    assert not store.has("a")
    assert not store.pin("a")
    assert store.claim(["a"]) is ClaimOutcome.OURS  # it is made without a claim
    assert store.put("a", b"1") is PutOutcome.NO_ROOM
    store.release("a")
    store.close()
    store.close()
