"""Processes that race, come, go and die at random: each message is got once.

All with real processes, each killed by SIGKILL or stopped at an exact point.
"""

from __future__ import annotations

import fcntl
import os
import random
from pathlib import Path

import pytest

from tests.support.arena import EDGE
from tests.support.arena_faults import IN_POOL, IN_RING, Start, files
from tests.support.processes import Processes
from vllm_omni_sched.config.errors import NoRoomError
from vllm_omni_sched.connectors.arena import ArenaOptions, ArenaTransport
from vllm_omni_sched.connectors.framing import make_message


def test_three_receivers_ask_for_the_same_messages_at_the_same_time(start: Start) -> None:
    """Each of 400 messages is received whole by one of them."""
    sender, receivers = start(), [start() for _ in range(3)]
    for number, receiver in enumerate(receivers):
        receiver.begin("receive_all", 400, number)
    sender.send_all(400, 3)
    assert sorted(i for receiver in receivers for i in receiver.result()) == list(range(400))
    for receiver in receivers:
        receiver.close()
    assert sender.health()[2]["in_flight"] == 0


def test_processes_come_and_go_at_the_same_time(
    all_processes: Processes, options: ArenaOptions, root: str, directory: Path
) -> None:
    """Three, 100 times each: the last one takes the arena away, and nobody is left in one that was."""
    processes = [all_processes.start() for _ in range(3)]
    for process in processes:
        process.begin("come_and_go", options.model_dump(), 100)
    assert [process.result() for process in processes] == [100] * 3
    assert os.listdir(root) == []


@pytest.mark.parametrize("made_again", [False, True])
def test_an_arena_that_goes_while_somebody_enters(
    options: ArenaOptions, directory: Path, made_again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fcntl.flock

    def flock(fd: int, how: int) -> None:
        monkeypatch.undo()
        directory.rmdir()
        if made_again:
            directory.mkdir(mode=0o700)
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    path = ArenaTransport(options)
    assert os.path.samestat(os.fstat(path._entered), directory.stat())
    path.put(make_message(EDGE, "k", 1))
    assert path.get(EDGE, "k") is not None
    path.close()


@pytest.mark.parametrize("seed", range(3))
def test_random_kills(start: Start, directory: Path, seed: int) -> None:
    """200 steps: whatever dies, each message is got by one that lives, and by one only."""
    rng = random.Random(seed)
    senders, receivers = [start(), start()], [start(), start()]
    waiting: dict[str, tuple[int, int]] = {}
    held: list[dict[str, tuple[int, int]]] = [{}, {}]
    kills = 0

    def settle() -> None:
        for sender in senders:
            sender.reap()
        for receiver in receivers:
            receiver.get("none")  # so that it knows all senders
            receiver.bury()

    for step in range(200):
        which = rng.randrange(2)
        act = rng.choices(["put", "get", "drop", "again", "kill receiver", "kill sender"], [40, 40, 15, 10, 4, 4])[0]
        if act == "put":
            nbytes = rng.choice([IN_RING, IN_POOL])
            try:
                senders[which].put(f"{step}", nbytes, step)
                waiting[f"{step}"] = nbytes, step
            except NoRoomError:
                continue
        elif act == "get" and waiting:
            key = rng.choice(sorted(waiting))
            hold = rng.random() < 0.5
            assert receivers[which].get(key, hold=hold) == waiting[key]
            if hold and waiting[key][0] == IN_POOL:
                held[which][key] = waiting[key]
            del waiting[key]
        elif act == "drop" and held[which]:
            key = rng.choice(sorted(held[which]))
            assert receivers[which].look(key) == held[which].pop(key)[1]
            receivers[which].drop(key)
        elif act == "again" and held[which]:
            assert receivers[1 - which].get(rng.choice(sorted(held[which]))) is None
        elif act == "kill receiver":
            receivers[which].kill()
            receivers[which] = start()
            waiting |= held[which]
            held[which] = {}
            settle()
            kills += 1
        elif act == "kill sender":
            senders[which].kill()
            senders[which] = start()
            kills += 1
    for key, found in waiting.items():
        assert receivers[rng.randrange(2)].get(key) == found
    for receiver, keys in zip(receivers, held, strict=True):
        for key in keys:
            assert receiver.look(key) == keys[key][1]
            receiver.drop(key)
    settle()
    assert [sender.health()[2].get("in_flight", 0) for sender in senders] == [0, 0]
    assert len(files(directory)) <= 2 + 2 * 2  # two inboxes, and outbox and pool of the senders that live
    assert kills > 5
