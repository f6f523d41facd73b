"""What becomes of messages, memory and files when senders are killed or stopped.

All with real processes, each killed by SIGKILL or stopped at an exact point.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.arena import EDGE, LONG
from tests.support.arena_faults import ARENA, IN_POOL, IN_RING, Start, files
from vllm_omni_sched.connectors.arena import ArenaOptions, ArenaTransport, meeting


@pytest.mark.parametrize("nbytes", [IN_RING, IN_POOL])
@pytest.mark.parametrize("where", ["storage:Storage.allocate", "index:Index.publish", "index:Layout.digest_at"])
def test_a_producer_killed_before_its_message_is_shown_has_put_nothing(
    start: Start, directory: Path, nbytes: int, where: str
) -> None:
    producer, consumer = start(), start()
    producer.put("before", nbytes, 1)
    producer.die_at(f"{ARENA}.{where}")
    producer.dies("put", "k", nbytes, 2)
    assert consumer.get("k") is None
    assert consumer.get("before") == (nbytes, 1)
    assert consumer.bury() == 1
    assert files(directory) == [".in"]


@pytest.mark.parametrize("nbytes", [IN_RING, IN_POOL])
def test_a_producer_killed_while_it_writes_has_put_nothing(start: Start, directory: Path, nbytes: int) -> None:
    producer, consumer = start(), start()
    producer.dies("die_halfway_through", "k", nbytes)
    assert consumer.get("k") is None
    assert consumer.bury() == 1
    assert files(directory) == [".in"]


@pytest.mark.parametrize("nbytes", [IN_RING, IN_POOL])
def test_what_a_producer_has_put_outlives_it(start: Start, directory: Path, nbytes: int) -> None:
    producer, consumer = start(), start()
    producer.put("a", nbytes, 1)
    producer.die_at(f"{ARENA}.index:Index.publish", after=True)
    producer.dies("put", "b", nbytes, 2)
    assert [consumer.get("a"), consumer.get("b", hold=True)] == [(nbytes, 1), (nbytes, 2)]
    if nbytes == IN_POOL:
        assert consumer.bury() == 0  # it is looked at
        assert consumer.look("b") == 2
    consumer.drop("b")
    assert consumer.bury() == 1
    assert files(directory) == [".in"]


def test_a_producer_killed_with_the_lock_of_a_slot_holds_nobody_up(start: Start) -> None:
    producer, consumer = start(), start()
    for key in ("a", "b"):
        producer.put(key, IN_POOL, 1)
    producer.die_at(f"{ARENA}.index:Index.free")
    producer.dies("discard", "a")
    assert [consumer.get("a"), consumer.get("b")] == [(IN_POOL, 1)] * 2


def test_a_producer_killed_while_it_makes_its_outbox_leaves_nothing_for_long(start: Start, directory: Path) -> None:
    producer, consumer = start(), start()
    assert consumer.get("k") is None
    producer.die_at("pathlib:Path.rename")
    producer.dies("put", "k", IN_RING, 1)
    assert files(directory) == [".in", ".new"]
    consumer.bury()
    assert files(directory) == [".in", ".new"]  # it might be somebody alive
    (unfinished,) = directory.glob("*.new")
    past = unfinished.stat().st_mtime - 2 * meeting.UNFINISHED_FOR
    os.utime(unfinished, (past, past))
    consumer.bury()
    assert files(directory) == [".in"]


def test_twenty_producers_one_after_the_other(start: Start, directory: Path) -> None:
    """Receivers forget those that are gone: no mapping, no file stays, whether they were killed or closed."""
    consumer = start()
    for i in range(20):
        producer = start()
        producer.put("k", IN_POOL, i)
        assert consumer.get("k") == (IN_POOL, i)
        if i % 2:
            producer.close()
        producer.kill()
        assert consumer.bury() == 1
        assert consumer.health()[2]["senders"] == 0
    assert files(directory) == [".in"]
    with open(f"/proc/{consumer.pid}/maps") as maps:
        assert not [line for line in maps if str(directory) in line and meeting.WAKE not in line]
    assert not [fd for fd in Path(f"/proc/{consumer.pid}/fd").iterdir() if ".out" in os.readlink(fd)]


def test_a_producer_that_closes_leaves_its_messages_and_then_nothing(start: Start, directory: Path) -> None:
    producer, consumer = start(), start()
    for key in "abc":
        producer.put(key, IN_POOL, 3)
    assert consumer.get("a", hold=True) == (IN_POOL, 3)
    producer.close()
    assert consumer.get("b") == (IN_POOL, 3)
    assert consumer.bury() == 0
    assert consumer.get("c") == (IN_POOL, 3)
    assert consumer.look("a") == 3
    consumer.drop("a")
    assert consumer.bury() == 1
    assert files(directory) == [".in"]


def test_messages_of_a_dead_producer_expire(start: Start, options: ArenaOptions, directory: Path) -> None:
    producer = start()
    producer.put_many(50, IN_RING)
    late = start(options.ttl_seconds + 1)
    assert late.get("none") is None
    assert late.bury() == 0  # who put them lives, and sees to it
    producer.kill()
    soon = start()
    assert soon.get("m7") == (IN_RING, 7)
    assert soon.bury() == 0
    assert late.bury() == 1
    assert late.get("m8") is None
    status, reason, facts = late.health()
    assert (status, reason, facts["orphans_expired"]) == ("degraded", "49 orphans_expired", 49)
    assert soon.bury() == 1
    assert files(directory) == [".in", ".in"]


def test_a_process_that_was_stopped_with_the_lock_of_a_slot_holds_nobody_up(start: Start) -> None:
    producer, consumer, other = start(), start(), start()
    for key in "abc":
        producer.put(key, IN_POOL, 1)
    consumer.die_at(f"{ARENA}.index:Index.claim", by=signal.SIGSTOP)  # it has seen it, and not yet taken it
    consumer.stops("get", "a")
    assert other.get("a") == (IN_POOL, 1)
    assert consumer.goes_on() is None
    consumer.die_at(f"{ARENA}.memory:ByteLocks.acquire", after=True, by=signal.SIGSTOP)
    consumer.stops("get", "b")
    assert other.get("b") is None
    assert producer.discard("b") == 0
    producer.put("b", IN_POOL, 2)
    assert other.get("b") == (IN_POOL, 2)
    assert consumer.goes_on() is None  # it was replaced
    consumer.die_at(f"{ARENA}.memory:ByteLocks.acquire", after=True, by=signal.SIGSTOP)
    consumer.stops("get", "c")
    assert producer.discard("c") == 0
    producer.reap()
    assert consumer.goes_on() == (IN_POOL, 1)  # so it is


def test_a_producer_killed_before_it_wakes_its_receiver_costs_it_one_pause(start: Start, options: ArenaOptions) -> None:
    producer, consumer = start(), ArenaTransport(options)
    producer.put("before", IN_RING, 1)
    assert consumer.get(EDGE, "before") is not None
    arrivals = consumer.arrivals(EDGE)
    assert arrivals is not None
    ticket = arrivals.ticket()
    producer.die_at(f"{ARENA}.wake:WakeWords.wake")
    producer.dies("put", "k", IN_RING, 2)
    arrivals.wait(ticket, 1e-3)  # nobody wakes it, and it goes on
    assert arrivals.may_be_there(["k"], ticket) == [True]
    assert consumer.get(EDGE, "k") is not None
    consumer.close()


def test_a_receiver_killed_in_its_sleep_holds_nobody_up(start: Start) -> None:
    asleep, producer, consumer = start(), start(), start()
    asleep.begin("sleep", LONG)
    producer.put("a", IN_RING, 1)
    asleep.kill()
    producer.put("b", IN_RING, 2)
    assert [consumer.get("a"), consumer.get("b")] == [(IN_RING, 1), (IN_RING, 2)]
