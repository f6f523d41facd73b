"""What receivers say they can open, where senders read it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.arena import FakeClock
from vllm_omni_sched.connectors.arena import meeting
from vllm_omni_sched.connectors.cuda_ipc.board import Board
from vllm_omni_sched.connectors.edge import Edge

AB, BC = Edge("a", "b"), Edge("b", "c")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def ours(tmp_path: Path, clock: FakeClock) -> Board:
    return Board(tmp_path, clock)


@pytest.fixture
def theirs(tmp_path: Path, clock: FakeClock) -> Board:
    return Board(tmp_path, clock)


def test_what_is_posted_is_read_by_edge(ours: Board, theirs: Board) -> None:
    assert ours.receivers(AB) == []
    theirs.post(AB, frozenset({"g1", "g0"}))
    theirs.post(BC, frozenset())
    assert ours.receivers(AB) == [{"g0", "g1"}]
    assert ours.receivers(BC) == [frozenset()]
    ours.post(AB, frozenset({"g0"}))
    assert sorted(map(sorted, ours.receivers(AB))) == [["g0"], ["g0", "g1"]]


def test_the_same_is_posted_once_and_what_is_new_takes_its_place(ours: Board, theirs: Board, tmp_path: Path) -> None:
    theirs.post(AB, frozenset())
    before = os.listdir(tmp_path)
    theirs.post(AB, frozenset())
    assert os.listdir(tmp_path) == before
    theirs.post(AB, frozenset({"g0"}))
    assert ours.receivers(AB) == [{"g0"}]
    assert len(os.listdir(tmp_path)) == 1


def test_who_has_gone_is_no_receiver(ours: Board, theirs: Board, tmp_path: Path) -> None:
    theirs.post(AB, frozenset({"g0"}))
    token = theirs.token()
    assert theirs.token() == token
    assert ours.is_alive(token)
    assert ours.receivers(AB)
    theirs.close()
    assert ours.receivers(AB) == []
    assert not ours.is_alive(token)
    assert os.listdir(tmp_path) == []


def test_what_the_dead_have_posted_counts_no_more_and_is_taken_away(ours: Board, theirs: Board, tmp_path: Path) -> None:
    theirs.post(AB, frozenset({"g0"}))
    token = theirs.token()
    assert ours.receivers(AB)
    for life in (theirs._posted[AB][2], theirs._own[1]):  # as the kernel does when a process is killed
        meeting.let_go(life)
    assert ours.receivers(AB) == []
    assert not ours.is_alive(token)
    ours.tidy()
    assert os.listdir(tmp_path) == []


def test_the_directory_is_read_again_only_when_it_has_changed(
    ours: Board, theirs: Board, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs.post(AB, frozenset({"g0"}))
    ours.receivers(AB)
    clock.now += 1
    read = []
    monkeypatch.setattr(os, "listdir", read.append)
    assert ours.receivers(AB) == [{"g0"}]
    assert read == []


@pytest.mark.parametrize("content", [b"", b"\xff\xff", b"\x81\xa1a\x01", b"\x91\x01"])
def test_what_cannot_be_read_can_open_nothing(ours: Board, theirs: Board, tmp_path: Path, content: bytes) -> None:
    theirs.post(AB, frozenset({"g0"}))
    (path,) = tmp_path.iterdir()
    path.write_bytes(content)
    assert ours.receivers(AB) == [frozenset()]


def test_tokens_are_names_and_nothing_else(ours: Board) -> None:
    for token in ("../x", "/etc/passwd", "", "ключ"):
        assert not ours.is_alive(token)


def test_a_directory_that_has_gone_is_an_error_to_be_caught(ours: Board, tmp_path: Path) -> None:
    tmp_path.rmdir()
    with pytest.raises(OSError, match="No such file"):
        ours.post(AB, frozenset())
    with pytest.raises(OSError, match="No such file"):
        ours.receivers(AB)
