"""What becomes of messages when receivers are killed, or both sides.

All with real processes, each killed by SIGKILL or stopped at an exact point.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.arena import small
from tests.support.arena_faults import ARENA, IN_POOL, IN_RING, Start, files
from vllm_omni_sched.connectors.arena import index


@pytest.mark.parametrize(
    ("nbytes", "where", "after"),
    [
        (IN_RING, f"{ARENA}.index:Index.take", False),
        (IN_RING, f"{ARENA}.memory:ByteLocks.acquire", True),
        (IN_RING, f"{ARENA}.index:Arrival", False),
        (IN_RING, f"{ARENA}.index:Arrival", True),
        (IN_POOL, f"{ARENA}.index:Index.claim", False),
        (IN_POOL, f"{ARENA}.index:Index.claim", True),
        (IN_POOL, f"{ARENA}.inbox:Peer.region", False),
        (IN_POOL, f"{ARENA}.inbox:Arrival", False),
        (IN_POOL, f"{ARENA}.inbox:Arrival", True),
        (IN_POOL, f"{ARENA}.index:Index.consume", False),
    ],
)
def test_a_consumer_killed_in_get_gives_its_message_back(start: Start, nbytes: int, where: str, after: bool) -> None:
    producer, consumer = start(), start()
    producer.put("k", nbytes, 9)
    consumer.die_at(where, after)
    if nbytes == IN_POOL and "consume" in where:
        consumer.get("k", hold=True)
        consumer.dies("drop", "k")
    else:
        consumer.dies("get", "k")
    producer.reap()
    again = start()
    assert again.get("k") == (nbytes, 9)
    assert again.get("k") is None
    producer.reap()
    assert producer.health()[2]["in_flight"] == 0


@pytest.mark.parametrize(
    ("nbytes", "state"), [(IN_RING, index.State.CONSUMED), (IN_POOL, index.State.LEASED)], ids=["ring", "pool"]
)
def test_a_consumer_killed_between_two_writes_to_the_index(start: Start, nbytes: int, state: int) -> None:
    producer, consumer = start(), start()
    producer.put("k", nbytes, 9)
    consumer.die_at_state(state)
    consumer.dies("get", "k")
    producer.reap()
    assert start().get("k") == (nbytes, 9)


def test_a_consumer_killed_while_it_holds_a_view(start: Start, directory: Path) -> None:
    producer, consumer = start(), start()
    for i in range(5):
        producer.put(f"{i}", IN_POOL, i)
        assert consumer.get(f"{i}", hold=True) == (IN_POOL, i)
    assert producer.reap() == 0
    consumer.kill()
    assert producer.reap() == 0
    status, reason, facts = producer.health()
    assert (status, reason, facts["in_flight"]) == ("degraded", "5 given_back", 5)
    again = start()
    for i in range(5):
        assert again.get(f"{i}") == (IN_POOL, i)
    assert producer.reap() == 5
    again.bury()
    assert files(directory) == [".in", ".out", ".pool"]  # the inbox of the dead has gone


@pytest.mark.parametrize("what", ["discarded", "replaced"])
def test_what_its_sender_took_back_does_not_return_from_the_dead(start: Start, what: str) -> None:
    producer, consumer = start(), start()
    producer.put("k", IN_POOL, 1)
    consumer.get("k", hold=True)
    if what == "discarded":
        assert producer.discard("k") == 0
    else:
        producer.put("k", IN_POOL, 2)
    assert consumer.look("k") == 1
    consumer.kill()
    producer.reap()
    again = start()
    assert again.get("k") == (None if what == "discarded" else (IN_POOL, 2))
    assert again.get("k") is None
    producer.reap()
    facts = producer.health()[2]
    assert facts["in_flight"] == 0
    assert facts["put"] == facts["consumed"] + facts["discarded"]


def test_a_view_outlives_the_close_of_its_path_but_not_its_process(start: Start) -> None:
    producer, consumer, other = start(), start(), start()
    for key in "ab":
        producer.put(key, IN_POOL, 4)
        consumer.get(key, hold=True)
    consumer.close()
    producer.reap()
    assert other.get("a") is None
    producer.put_many(30, IN_POOL)
    assert consumer.look("a") == 4
    consumer.drop("a")
    producer.reap()
    facts = producer.health()[2]
    assert (facts["consumed"], facts["in_flight"]) == (1, 31)
    consumer.kill()
    producer.reap()
    assert other.get("b") == (IN_POOL, 4)


@pytest.mark.parametrize("nbytes", [IN_RING, IN_POOL])
def test_both_are_killed_and_start_again_under_the_same_name(start: Start, directory: Path, nbytes: int) -> None:
    producer, consumer = start(), start()
    for i in range(6):
        producer.put(f"{i}", nbytes, i)
    assert consumer.get("0") == (nbytes, 0)
    consumer.die_at(f"{ARENA}.{'index' if nbytes == IN_RING else 'inbox'}:Arrival")
    consumer.dies("get", "1")
    producer.kill()
    producer, consumer = start(), start()
    producer.put("5", nbytes, 50)
    producer.put("new", nbytes, 60)
    assert consumer.get("new") == (nbytes, 60)
    leased = nbytes == IN_POOL  # what is in the ring is never anybody's
    if leased:
        assert consumer.get("1") is None
    assert consumer.bury() == 0
    assert consumer.health()[2]["orphans_given_back"] == leased
    assert [consumer.get(f"{i}") for i in (1, 2, 3, 4)] == [(nbytes, i) for i in (1, 2, 3, 4)]
    assert {consumer.get("5"), consumer.get("5")} == {(nbytes, 5), (nbytes, 50)}  # one of each sender
    assert consumer.bury() == 1
    producer.close()
    consumer.bury()
    assert files(directory) == [".in"]


def test_the_next_arena_takes_away_what_one_left_whose_processes_were_all_killed(
    start: Start, root: str, directory: Path
) -> None:
    for process in (start(), start()):
        process.put_many(3, IN_POOL)
        process.get("m1", hold=True)
        process.kill()
    assert len(files(directory)) == 6
    other = start(options=small(root, arena="b"))
    assert not directory.exists()
    other.close()
    assert os.listdir(root) == []
