"""What is said in the directory of an arena, when that fails halfway, and when it is read again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.arena import FakeClock
from tests.support.descriptors import nothing_left_open
from vllm_omni_sched.connectors.arena import meeting
from vllm_omni_sched.connectors.arena.meeting import SETTLES, Listing, post, take_away


def test_what_is_posted_is_private_and_says_that_its_maker_lives(tmp_path: Path) -> None:
    path = tmp_path / "a.said"
    life = post(path, b"this")
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"this", 0o600)
    assert meeting.is_alive(path)
    take_away(path, life)
    assert os.listdir(tmp_path) == []
    assert life not in meeting._locks


@pytest.mark.parametrize("step", ["live", "rename"])
def test_what_fails_halfway_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    before = set(meeting._locks)
    with nothing_left_open(), monkeypatch.context() as broken:
        broken.setattr(*{"live": (meeting, "live"), "rename": (Path, "rename")}[step], fails)
        with pytest.raises(OSError, match="No space"):
            post(tmp_path / "a.said", b"this")
    assert os.listdir(tmp_path) == []
    assert set(meeting._locks) == before


def test_names_are_read_when_the_directory_has_changed(tmp_path: Path) -> None:
    clock = FakeClock()
    listing = Listing(tmp_path, clock)
    assert listing.names() == []
    assert listing.names() == []  # the time stamp may be that of a change to come
    clock.now += 2 * SETTLES
    assert listing.names() is None
    assert listing.names(again=True) == []
    (tmp_path / "a").touch()
    os.utime(tmp_path, ns=(1, 1))
    assert listing.names() == ["a"]


def test_names_that_could_not_be_read_are_read_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError(24, "Too many open files")

    clock = FakeClock()
    listing = Listing(tmp_path, clock)
    with monkeypatch.context() as broken:
        broken.setattr(os, "listdir", fails)
        with pytest.raises(OSError, match="Too many"):
            listing.names()
    clock.now += 2 * SETTLES
    assert listing.names() == []
