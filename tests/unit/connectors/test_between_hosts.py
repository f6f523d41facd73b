"""The way between the store of a host and one between hosts: rules of `BetweenHosts`, with two stores of one host."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.encoding_check import Encodings
from vllm_omni_sched.clock import monotonic_seconds, sleep_seconds
from vllm_omni_sched.config.errors import RendezvousError, TransportClosedError
from vllm_omni_sched.connectors.between_hosts import BetweenHosts, Inquiry, Phase, SharedItem, StoreCounts
from vllm_omni_sched.connectors.encodings import ClaimOutcome, EncodingStore

ANSWER, WAIT = 0.5, 10.0
ITEM = SharedItem("image", 4)


class Host:
    """The store of a host, the way to the one between hosts, and a clock that the test moves."""

    def __init__(
        self,
        folder: Path,
        number: int,
        *,
        max_bytes: int = 1000,
        answer_seconds: float = ANSWER,
        clock: Any = None,
        **how: Any,
    ) -> None:
        self.now, self.why_down = 0.0, ""
        self.tries, self.check = 0, Encodings()
        root = folder / f"host{number}"
        root.mkdir()
        self.store = EncodingStore(str(root), "space", max_bytes=max_bytes, ttl_seconds=60.0)
        self.far = EncodingStore(str(folder), "far", max_bytes=1000, ttl_seconds=60.0)
        self.way = BetweenHosts(
            self.store,
            self._connect,
            self.check,
            answer_seconds=answer_seconds,
            wait_seconds=WAIT,
            clock=clock or (lambda: self.now),
            **{"threaded": False, **how},
        )

    def _connect(self) -> EncodingStore:
        self.tries += 1
        if self.why_down:
            raise RendezvousError(self.why_down)
        return self.far

    def ask(self, *keys: str) -> Inquiry:
        assert self.store.claim(keys) is ClaimOutcome.OURS
        return self.way.ask(dict.fromkeys(keys, ITEM))

    def close(self) -> None:
        self.way.close()
        self.far.close()
        self.store.close()


Start = Callable[..., Host]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    hosts: list[Host] = []

    def make(**how: Any) -> Host:
        hosts.append(Host(tmp_path, len(hosts), **how))
        if not hosts[-1].way._thread:
            hosts[-1].way.work()
        return hosts[-1]

    yield make
    for host in hosts:
        host.close()


def test_what_is_there_is_fetched_and_ends_the_claim_on_the_host(start: Start) -> None:
    one, other = start(), start()
    one.far.put("a", b"1")
    inquiry = other.ask("a", "b")
    assert not other.way.is_over(inquiry)
    other.way.work()
    assert other.way.is_over(inquiry)
    assert inquiry.fetched == {"a"}
    assert other.store.get("a") == b"1"
    assert one.far.claim(["b"]) is ClaimOutcome.OTHERS  # the other one is to make it
    assert other.way.counts == StoreCounts(fetched=1)


def test_what_another_host_puts_between_two_looks_is_fetched(start: Start) -> None:
    one, other = start(), start()
    get = other.far.get

    def late(key: str) -> bytes | None:
        """Look, and let the other host put the encoding after the look."""
        found = get(key)
        one.far.put(key, b"1")
        return found

    other.far.get = late  # type: ignore[method-assign]
    inquiry = other.ask("a")
    other.way.work()
    assert other.way.is_over(inquiry)
    assert inquiry.fetched == {"a"}


def test_what_another_host_makes_is_awaited_and_then_fetched(start: Start) -> None:
    one, other = start(), start()
    assert one.ask("a")
    one.way.work()
    inquiry = other.ask("b", "a")
    other.way.work()
    other.now = WAIT - 1
    assert inquiry.phase is Phase.AWAITED
    assert not other.way.is_over(inquiry)
    assert one.far.claim(["b"]) is ClaimOutcome.OURS  # all or none: it holds nothing while it waits
    one.far.release("b")
    one.store.put("a", b"1")
    one.way.offer("a", ITEM)
    one.way.work()
    other.way.work()
    assert other.way.is_over(inquiry)
    assert other.store.get("a") == b"1"
    assert (one.way.counts, other.way.counts) == (StoreCounts(put=1), StoreCounts(fetched=1, awaited=1))


def test_an_inquiry_waits_for_another_host_for_a_bounded_time_and_keeps_no_claim_then(start: Start) -> None:
    one, other = start(), start()
    one.ask("a")
    one.way.work()
    inquiry = other.ask("a", "b")
    other.way.work()
    other.now = WAIT
    assert other.way.is_over(inquiry)
    one.way.drop(None, "a")
    one.way.work()
    other.way.work()
    assert one.far.claim(["a", "b"]) is ClaimOutcome.OURS
    assert other.way.counts == StoreCounts(awaited=1, gave_up=1)


def test_a_store_that_is_down_is_not_waited_for(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    one = start()
    one.ask("a")
    one.way.work()
    inquiry = one.ask("b", "c")
    one.far.get = one.far.tidy = _raises(RendezvousError("no master answers"))  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING, "vllm.omni_sched"):
        assert one.way.work() > 0
        assert one.way.work() > 0
    assert one.way.is_over(inquiry)
    assert one.way.is_over(one.ask("d"))
    one.way.offer("a", ITEM)
    assert one.way.counts == StoreCounts(unavailable=3)
    assert not one.way.is_up
    del one.far.get, one.far.tidy
    other = start()
    assert other.far.claim(["a"]) is ClaimOutcome.OTHERS
    assert one.way.work() > 0
    assert other.far.claim(["a"]) is ClaimOutcome.OURS  # what was made meanwhile is claimed no more
    assert not one.way.is_over(one.ask("e"))
    down, up = (record.message for record in caplog.records)  # each is said once
    assert "cannot be used" in down
    assert "no master answers" in down
    assert "answers again" in up


def test_a_store_that_tells_nothing_is_not_waited_for(start: Start) -> None:
    one = start()
    inquiry = one.ask("a", "b")
    one.now = ANSWER
    assert one.way.is_over(inquiry)
    assert one.way.is_over(one.ask("c"))  # it has still not answered
    one.way.work()
    assert not one.way.is_over(one.ask("d"))
    assert one.way.counts == StoreCounts(unavailable=3)
    assert one.far.claim(["a", "b"]) is ClaimOutcome.OURS


def test_a_store_that_cannot_be_reached_is_tried_again(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    one = start()
    one.way._leave()
    one.way.is_up, one.why_down = False, "no Mooncake master answers at 10.0.0.1:50051"
    with caplog.at_level(logging.WARNING, "vllm.omni_sched"):
        one.way.work()
        one.way.work()
        one.why_down = ""
        one.far = EncodingStore(str(one.far.directory.parents[1]), "far", max_bytes=1000, ttl_seconds=60.0)
        one.way.work()
    assert one.way.is_up
    assert len(caplog.records) == 2  # that it is down, and that it answers again
    assert "10.0.0.1:50051" in caplog.text


def test_what_is_not_needed_any_more_is_not_claimed(start: Start) -> None:
    one = start()
    inquiry = one.ask("a", "b")
    one.way.drop(inquiry, "a")
    one.way.work()
    assert one.far.claim(["a"]) is ClaimOutcome.OURS
    other = start()
    assert other.far.claim(["b"]) is ClaimOutcome.OTHERS
    one.way.drop(inquiry, "b")
    one.way.work()
    assert other.far.claim(["b"]) is ClaimOutcome.OURS


def test_what_has_left_the_host_before_it_was_put_is_claimed_no_more(start: Start) -> None:
    one, other = start(), start()
    one.ask("a")
    one.way.work()
    one.way.offer("a", ITEM)  # and the store of the host does not have it
    one.way.work()
    assert other.far.claim(["a"]) is ClaimOutcome.OURS
    assert one.way.counts == StoreCounts()


def test_what_the_store_has_no_room_for_is_counted(start: Start) -> None:
    one = start(max_bytes=5000)
    one.store.put("large", bytes(2000))
    one.way.offer("large", ITEM)
    one.way.work()
    assert one.way.counts == StoreCounts(refused=1)


def test_what_the_host_has_no_room_for_is_made(start: Start) -> None:
    one = start(max_bytes=10)
    one.far.put("a", bytes(20))
    inquiry = one.ask("a")
    one.way.work()
    assert one.way.is_over(inquiry)
    assert inquiry.fetched == set()
    assert one.way.counts == StoreCounts()


def test_what_the_check_refuses_is_made_and_told_once(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    one, other = start(), start()
    for key in ("a", "b"):
        one.far.put(key, b"malformed")
    one.far.put("c", b"1")
    with caplog.at_level(logging.WARNING, "vllm.omni_sched"):
        inquiry = other.ask("a", "b", "c", "d")
        other.way.work()
    assert other.way.is_over(inquiry)
    assert inquiry.answered
    assert (inquiry.fetched, inquiry.refused) == ({"c"}, {"a", "b"})
    assert not other.store.has("a")
    assert other.way.counts == StoreCounts(fetched=1, malformed=2)  # each once, though it is looked for twice
    (told,) = caplog.records
    assert "encoding 'a' in the store between hosts is not used, because it is malformed" in told.message


def test_nothing_is_fetched_that_cannot_be_checked_until_one_was_made(start: Start) -> None:
    one, other = start(), start()
    one.far.put("a", b"1")
    other.check.knows = False
    inquiry = other.ask("a", "b")
    other.way.work()
    assert other.way.is_over(inquiry)
    assert inquiry.fetched == inquiry.refused == set()
    other.store.put("b", b"2")
    other.way.offer("b", ITEM)
    other.way.work()
    assert other.check.learnt == [(b"2", ITEM)]
    assert other.way.counts == StoreCounts(put=1)


def test_the_thread_does_all_that_and_ends(start: Start) -> None:
    one = start(threaded=True, answer_seconds=60.0, clock=monotonic_seconds)
    two = start(threaded=True, answer_seconds=60.0, clock=monotonic_seconds)
    until = monotonic_seconds() + 30
    while not (one.way.is_up and two.way.is_up):
        assert monotonic_seconds() < until
        sleep_seconds(0.001)
    first = one.ask("a")
    while not one.way.is_over(first):
        sleep_seconds(0.001)
    second = two.ask("a")
    one.store.put("a", b"1")
    one.way.offer("a", ITEM)
    while not two.way.is_over(second):
        sleep_seconds(0.001)
    assert two.store.get("a") == b"1"
    one.close()
    two.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "omni-sched-between-hosts"]


def test_a_client_that_was_closed_by_the_end_of_the_process_ends_the_thread(start: Start) -> None:
    one = start()
    one.far.get = _raises(TransportClosedError("closed"))  # type: ignore[method-assign]
    one.ask("a")
    one.way.work()
    assert one.way._closing


def _raises(error: Exception) -> Callable[..., Any]:
    def fails(*_: Any) -> Any:
        raise error

    return fails
