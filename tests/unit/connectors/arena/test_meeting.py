"""Where an arena can be, what its files may be, and who may take it away."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.arena import EDGE, pixels, small
from tests.support.arena_faults import IN_POOL
from tests.support.tiers import files as disk_options
from vllm_omni_sched.config.errors import RendezvousError
from vllm_omni_sched.connectors.arena import ArenaTransport, meeting
from vllm_omni_sched.connectors.disk import DiskTransport
from vllm_omni_sched.connectors.framing import make_message


def test_an_arena_that_was_made_again_is_not_removed_by_who_saw_the_old_one_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its look and its lock, the last process left and others came."""
    arena = tmp_path / "a"
    arena.mkdir(mode=0o700)
    flock = fcntl.flock

    def others_come_first(fd: int, operation: int) -> None:
        arena.rmdir()
        arena.mkdir(mode=0o700)
        (arena / "message").touch()
        flock(fd, operation)

    monkeypatch.setattr(meeting.fcntl, "flock", others_come_first)
    assert meeting.sweep(tmp_path) == 0
    assert [path.name for path in arena.iterdir()] == ["message"]


@pytest.mark.parametrize("root", ["/proc", "/proc/self/fd"])
def test_a_place_where_no_directory_can_be_made_is_an_error_that_names_the_option(root: str) -> None:
    for make in (lambda: ArenaTransport(small(root)), lambda: DiskTransport(disk_options(root))):
        with pytest.raises(RendezvousError, match=rf"cannot make or open {root}/.*connector's option `directory`"):
            make()


def test_a_directory_that_is_always_gone_again_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As somebody would see it whose every look comes between two others' making and taking it away."""
    real, opened = os.open, 0

    def gone(path: object, *args: int) -> int:
        nonlocal opened
        if str(path).endswith("/a"):
            opened += 1
            raise FileNotFoundError(2, "No such file or directory")
        return real(str(path), *args)

    monkeypatch.setattr(meeting.os, "open", gone)
    with pytest.raises(RendezvousError, match="option `directory`"):
        meeting.enter(str(tmp_path), "a")
    assert opened == meeting.TRIES


@pytest.fixture(params=[0o777, 0o077, 0], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.usefixtures("umask")
def test_modes_do_not_follow_the_umask(root: str) -> None:
    """Directories that their user can enter and files that it can open, and nobody else."""
    path, disk = ArenaTransport(small(root)), DiskTransport(disk_options(root))
    for one in (path, disk):
        one.put(make_message(EDGE, "k", pixels(1, IN_POOL)))
        assert one.get(EDGE, "none") is None
    found = {made: stat.S_IMODE(made.lstat().st_mode) for made in Path(root).rglob("*")}
    assert len(found) >= 7
    assert {mode for made, mode in found.items() if made.is_dir()} == {0o700}
    assert {mode for made, mode in found.items() if not made.is_dir()} == {0o600}
    for one in (path, disk):
        arrival = one.get(EDGE, "k")
        assert arrival is not None
        assert arrival.open()[0, 0] == 1
        del arrival
        one.close()
