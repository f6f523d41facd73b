"""The file through which senders wake receivers, and what happens where there is none."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from tests.support.arena import EDGE, MIB, pixels, small
from vllm_omni_sched.connectors.arena import ArenaTransport, memory, wake
from vllm_omni_sched.connectors.arena.memory import modified_ns, size_of
from vllm_omni_sched.connectors.arena.wake import FILE, WORDS, WakeWords, wake_words
from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.framing import make_message


def test_the_file_is_private_and_complete_under_any_umask(tmp_path: Path) -> None:
    before = os.umask(0o177)
    try:
        WakeWords(tmp_path)
    finally:
        os.umask(before)
    found = (tmp_path / FILE).lstat()
    assert (stat.S_IMODE(found.st_mode), found.st_size) == (0o600, 4 * WORDS)
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_all_who_open_it_see_the_same_words(tmp_path: Path) -> None:
    one, other = WakeWords(tmp_path), WakeWords(tmp_path)
    one.wake(7)
    assert (other.value(7), other.value(8)) == (1, 0)
    other.wait(7, 0, 10.0)  # it has changed
    one._words[7] = 0xFFFFFFFF
    one.wake(7)
    assert other.value(7) == 0


@pytest.mark.parametrize("spoil", ["short", "open to others", "a link"])
def test_a_file_of_another_kind_is_not_used(tmp_path: Path, spoil: str) -> None:
    file = tmp_path / FILE
    if spoil == "a link":
        file.symlink_to(tmp_path / "elsewhere")
    else:
        file.write_bytes(bytes(4 * WORDS if spoil == "open to others" else 10))
        file.chmod(0o644 if spoil == "open to others" else 0o600)
    assert wake_words(tmp_path) is None


@pytest.mark.parametrize("lack", ["call", "room"])
def test_without_futexes_or_room_receivers_poll(root: str, monkeypatch: pytest.MonkeyPatch, lack: str) -> None:
    def full(*args: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        if lack == "call":
            patch.setattr(wake, "_CALL", None)
        else:
            patch.setattr(wake, "_open", full)
        sender, receiver = ArenaTransport(small(root)), ArenaTransport(small(root))
    assert receiver.arrivals(EDGE) is None
    sender.put(make_message(EDGE, "k", pixels(1, 10)))
    assert receiver.get(EDGE, "k") is not None
    sender.close()
    receiver.close()


def test_edges_have_words_of_their_own() -> None:
    edges = [Edge(str(number), str(number + 1)) for number in range(5)]
    assert len({wake.word_of(edge) for edge in edges}) == len(edges)


@pytest.mark.parametrize("statx", [memory._statx, None], ids=["statx", "fstat"])
def test_size_and_time_of_a_file_are_those_of_fstat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statx: Any
) -> None:
    monkeypatch.setattr(memory, "_statx", statx)
    file = tmp_path / "file"
    file.write_bytes(bytes(MIB + 1))
    os.utime(file, ns=(1, 1_700_000_000_123_456_789))
    with open(file) as opened:
        expected = os.fstat(opened.fileno())
        assert size_of(opened.fileno()) == expected.st_size == MIB + 1
        assert modified_ns(opened.fileno()) == expected.st_mtime_ns
