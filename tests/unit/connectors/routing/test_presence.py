"""Which stages are on this host, and which way messages for them go; with real processes that come and die."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.arena import place, small
from tests.support.scripted_transport import ScriptedTransport
from vllm_omni_sched.config.errors import NoRoomError, RendezvousError
from vllm_omni_sched.connectors.arena import ArenaTransport, meeting
from vllm_omni_sched.connectors.arena.meeting import SETTLES
from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.framing import make_message
from vllm_omni_sched.connectors.routing import Presence, RoutedTransport, RoutingOptions, Way
from vllm_omni_sched.connectors.routing.presence import CHECK_EVERY

STAGE = """
import sys
from pathlib import Path
from vllm_omni_sched.connectors.routing import Presence
directory, host, stage, replica = sys.argv[1:]
presence = Presence(Path(directory), host=host or None)
presence.announce(stage, int(replica))
print("announced", flush=True)
sys.stdin.readline()
presence.close()
print("closed", flush=True)
sys.stdin.readline()
"""


class Process:
    """One that serves a stage."""

    def __init__(self, directory: Path, stage: str = "1", host: str = "", replica: int = 0) -> None:
        command = [sys.executable, "-c", STAGE, str(directory), host, stage, str(replica)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._hear("announced")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self._hear("closed")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()

    def _hear(self, word: str) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == word + "\n"


@pytest.fixture
def root() -> Iterator[str]:
    with place() as root:
        yield root


@pytest.fixture
def arena(root: str) -> Iterator[ArenaTransport]:
    path = ArenaTransport(small(root))
    yield path
    path.close()


@pytest.fixture
def processes(arena: ArenaTransport) -> Iterator[Any]:
    made: list[Process] = []

    def start(**said: Any) -> Process:
        made.append(Process(arena.directory, **said))
        return made[-1]

    yield start
    for process in made:
        process.kill()


class Sender:
    """Of stage 0, with the arena and a path between hosts; `used` says which way a message went."""

    def __init__(self, arena: ArenaTransport, **options: Any) -> None:
        self.now = [100.0]
        self.far = ScriptedTransport("far", self.now)
        self.presence = Presence(arena.directory, lambda: self.now[0])
        made = RoutingOptions(**options)
        self.path = RoutedTransport([Way(arena, 0), Way(self.far, 1)], made, None, lambda: self.now[0], self.presence)

    def used(self, target: str = "1") -> str:
        before = len(self.far.puts)
        self.path.put(make_message(Edge("0", target), "k", 1))
        return "far" if len(self.far.puts) > before else "arena"

    def later(self, seconds: float = CHECK_EVERY) -> None:
        self.now[0] += seconds


def test_a_stage_that_has_not_announced_itself_is_sent_to_between_hosts_until_it_does(
    arena: ArenaTransport, processes: Any
) -> None:
    sender = Sender(arena)
    assert [sender.used(), sender.used()] == ["far", "far"]
    assert sender.path.health().facts["stages_here"] == {"1": False}
    assert sender.path.health().facts["served"] == {"0->1 far only": 2}
    processes()
    assert sender.used() == "arena"
    assert sender.used("2") == "far"
    assert sender.path.health().facts["stages_here"] == {"1": True, "2": False}


def test_a_stage_of_another_host_is_not_here_though_the_directory_is_shared(
    arena: ArenaTransport, processes: Any
) -> None:
    sender = Sender(arena)
    processes(host="another boot")
    assert sender.used() == "far"


def test_stages_of_other_arenas_are_not_here(arena: ArenaTransport) -> None:
    with place() as elsewhere:
        other = ArenaTransport(small(elsewhere))
        process = Process(other.directory)
        try:
            assert Sender(arena).used() == "far"
            assert Sender(other).used() == "arena"
        finally:
            process.kill()
            other.close()


@pytest.mark.parametrize("end", ["kill", "close"])
def test_a_stage_that_ends_is_not_here_any_more(arena: ArenaTransport, processes: Any, end: str) -> None:
    sender, process = Sender(arena), processes()
    assert sender.used() == "arena"
    getattr(process, end)()
    sender.later()
    assert sender.used() == "far"


def test_what_the_dead_have_left_is_taken_away(arena: ArenaTransport, processes: Any) -> None:
    processes().kill()
    own = arena.directory / f"own{meeting.INBOX}"
    own.touch()
    left = set(arena.directory.glob(f"*{meeting.STAGE}"))
    assert len(left) == 1
    meeting.tidy(arena.directory, own)
    assert not set(arena.directory.glob(f"*{meeting.STAGE}"))


def test_all_replicas_of_a_stage_have_to_be_here(arena: ArenaTransport, processes: Any) -> None:
    sender, of_two = Sender(arena), Sender(arena, replicas={"1": 2})
    processes(replica=1)
    assert [sender.used(), of_two.used()] == ["far", "far"]  # replica 0 is somewhere else
    processes(replica=0)
    assert [sender.used(), of_two.used()] == ["arena", "arena"]


def test_of_two_replicas_one_here_is_not_enough(arena: ArenaTransport, processes: Any) -> None:
    sender = Sender(arena, replicas={"1": 2})
    processes(replica=0)
    processes(replica=0)  # the other process of the same replica
    assert sender.used() == "far"


def test_edges_know_better(arena: ArenaTransport, processes: Any) -> None:
    sender = Sender(arena, edges={"0->1": ["arena"], "0->2": ["far"]})
    processes(stage="2")
    assert [sender.used("1"), sender.used("2")] == ["arena", "far"]


def test_with_the_arena_alone_it_is_as_it_was(arena: ArenaTransport) -> None:
    presence = Presence(arena.directory)
    path = RoutedTransport([Way(arena, 0)], RoutingOptions(), presence=presence)
    path.put(make_message(Edge("0", "1"), "k", 1))
    assert presence.listings == 0


def test_a_path_between_hosts_that_is_full_is_not_replaced_by_one_that_does_not_reach(arena: ArenaTransport) -> None:
    sender = Sender(arena)
    sender.far.fails = NoRoomError("full")
    with pytest.raises(NoRoomError, match="full"):
        sender.used()


def test_the_directory_is_listed_when_it_has_changed_and_now_and_then(arena: ArenaTransport, processes: Any) -> None:
    sender = Sender(arena)
    processes()
    for _ in range(3):
        assert sender.used() == "arena"
    sender.later(2 * SETTLES)
    before = sender.presence.listings
    for _ in range(1000):
        assert sender.presence.is_here("1")
    assert sender.presence.listings == before
    sender.later()
    for _ in range(1000):
        assert sender.presence.is_here("1")
    assert sender.presence.listings == before + 1


def test_strange_files_are_passed_over(arena: ArenaTransport) -> None:
    for name in ("x", "a-b-c-d", "a-1", "----"):
        (arena.directory / f"{name}{meeting.STAGE}").touch()
    assert not Presence(arena.directory).is_here("1")


@pytest.mark.parametrize("step", ["live", "rename"])
def test_what_cannot_be_announced_leaves_nothing(
    arena: ArenaTransport, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fails(*_: object) -> None:
        raise OSError(24, "Too many open files")

    presence = Presence(arena.directory)
    before = set(arena.directory.iterdir()), set(meeting._locks)
    with monkeypatch.context() as broken:
        broken.setattr(*{"live": (meeting, "live"), "rename": (Path, "rename")}[step], fails)
        with pytest.raises(RendezvousError, match=r"cannot announce stage 1 in .*Too many open files"):
            presence.announce("1")
    assert (set(arena.directory.iterdir()), set(meeting._locks)) == before
    assert not presence.is_here("1")
    presence.announce("1")
    assert presence.is_here("1")
    presence.close()


def test_a_directory_that_could_not_be_read_is_read_again(
    arena: ArenaTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError(24, "Too many open files")

    now = 100.0
    presence = Presence(arena.directory, clock=lambda: now)
    presence.announce("1")
    assert presence.is_here("1")
    now += CHECK_EVERY
    with monkeypatch.context() as broken:
        broken.setattr(os, "listdir", fails)
        assert not presence.is_here("1")
    assert presence.is_here("1")
    presence.close()


def test_close_takes_back_what_was_announced(arena: ArenaTransport) -> None:
    presence = Presence(arena.directory)
    presence.announce("1")
    assert Presence(arena.directory).is_here("1")
    presence.close()
    presence.close()
    assert not Presence(arena.directory).is_here("1")
    assert not list(arena.directory.glob(f"*{meeting.STAGE}"))
