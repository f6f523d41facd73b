"""Check the numbered promises of `Transport`, and its errors, on every transport between stages.

A transport of another kind is one more entry of `tests.support.transport_kinds.TRANSPORTS`.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.arena import MIB
from tests.support.transport_kinds import TRANSPORTS, Kind, Open, mooncake
from vllm_omni_sched.clock import monotonic_seconds, sleep_seconds
from vllm_omni_sched.config.errors import MessageTooLargeError, NoRoomError, TransportClosedError
from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.framing import make_message
from vllm_omni_sched.connectors.transport import Status, Transport

AB, BC = Edge("a", "b"), Edge("b", "c")
KEYS = ["", "a", "a/b/../c", "a\0b", "\0", "ключ-键-🔑", "\udc80", " ", "x" * 4096, "a\nb"]


def put(path: Transport, key: str, payload: Any, edge: Edge = AB, deadline: float | None = None) -> int:
    return path.put(make_message(edge, key, payload), deadline)


def get(path: Transport, key: str, edge: Edge = AB) -> Any:
    """At once, or when the path looks for it the next time."""
    until = monotonic_seconds() + 5
    while (arrival := path.get(edge, key)) is None:
        assert monotonic_seconds() < until, f"{key!r} is not there"
        sleep_seconds(1e-4)
    return arrival.open()


@pytest.mark.parametrize("key", KEYS, ids=range(len(KEYS)))
def test_a_message_is_found_by_edge_and_key_alone(sender: Transport, receiver: Transport, key: str) -> None:
    assert receiver.get(AB, key) is None
    assert put(sender, key, {"x": np.arange(5), "n": 1}) > 0
    found = get(receiver, key)
    assert found["n"] == 1
    assert found["x"].tolist() == list(range(5))
    assert receiver.get(AB, key) is None


def test_keys_that_look_alike_are_different(sender: Transport, receiver: Transport) -> None:
    edges = [AB, BC, Edge("a", "b:c"), Edge("a:b", "c"), Edge("", "ab"), Edge("ab", ""), Edge("a", "b/")]
    names = [(edge, key) for edge in edges for key in KEYS]
    for i, (edge, key) in enumerate(names):
        put(sender, key, i, edge)
    for i, (edge, key) in reversed(list(enumerate(names))):
        assert get(receiver, key, edge) == i


def test_one_process_sends_to_itself(sender: Transport) -> None:
    put(sender, "k", {"x": torch.arange(4)})
    assert get(sender, "k")["x"].tolist() == [0, 1, 2, 3]
    assert sender.get(AB, "k") is None


def test_the_second_put_of_a_key_replaces_the_first(sender: Transport, receiver: Transport) -> None:
    for i in range(5):
        put(sender, "k", i)
    put(sender, "k", "of another edge", BC)
    assert get(receiver, "k") == 4
    assert receiver.get(AB, "k") is None
    assert get(receiver, "k", BC) == "of another edge"


def test_a_key_can_be_put_again_when_it_was_got(sender: Transport, receiver: Transport) -> None:
    held = []
    for i in range(5):
        put(sender, "k", {"x": torch.full((1, 5000), i)})
        held.append(get(receiver, "k")["x"])
    assert [int(tensor.min()) for tensor in held] == [int(tensor.max()) for tensor in held] == [0, 1, 2, 3, 4]


def test_discard_takes_back_what_nobody_has_got_on_all_edges(sender: Transport, receiver: Transport) -> None:
    put(sender, "k", 1)
    put(sender, "k", 2, BC)
    put(sender, "other", 3)
    assert sender.discard("k") == 2
    assert sender.discard("k") == 0
    assert receiver.get(AB, "k") is None
    assert receiver.get(BC, "k") is None
    assert get(receiver, "other") == 3
    assert receiver.discard("other") == 0  # it did not send it


def test_one_message_of_one_edge_is_withdrawn(sender: Transport, receiver: Transport) -> None:
    assert not sender.withdraw(AB, "k")
    for payload in ({"x": torch.ones(1, 5000)}, 1):
        put(sender, "k", payload)
        put(sender, "k", payload, BC)
        assert not receiver.withdraw(AB, "k")  # it has not put it
        assert sender.withdraw(AB, "k")
        assert not sender.withdraw(AB, "k")
        assert receiver.get(AB, "k") is None
        assert receiver.get(BC, "k") is not None
        assert not sender.withdraw(BC, "k")
        sender.reap()
        assert sender.health().facts["in_flight"] == 0


def test_discard_of_what_was_got_takes_nothing_back(sender: Transport, receiver: Transport) -> None:
    put(sender, "small", 1)
    put(sender, "large", {"x": torch.ones(1, 5000)})
    assert get(receiver, "small") == 1
    held = get(receiver, "large")["x"]
    assert sender.discard("small") == 0
    assert sender.discard("large") == 0
    for i in range(20):
        put(sender, f"{i}", {"x": torch.zeros(1, 5000)})
    assert held.min() == 1
    assert receiver.discard("small") == 0  # it did not send it


def test_views_stay_what_they_are_until_they_go(sender: Transport, receiver: Transport) -> None:
    """Slices of one tensor of several, after everything else of the message has gone, and room is given out again."""
    put(sender, "k", {"x": torch.arange(30000).view(3, 10000), "y": np.ones((2, 3))})
    part = get(receiver, "k")["x"][1, 5000:5010]
    for i in range(30):
        put(sender, f"{i}", {"x": torch.full((3, 10000), -1)})
        assert get(receiver, f"{i}")["x"].max() == -1
        sender.reap()
    assert part.tolist() == list(range(15000, 15010))


@pytest.mark.parametrize("payload", [b"", {}, [], "", None, np.zeros((0, 3)), torch.zeros(0)], ids=range(7))
def test_empty_payloads(sender: Transport, receiver: Transport, payload: Any) -> None:
    put(sender, "k", payload)
    found = get(receiver, "k")
    assert type(found) is type(payload)
    assert payload is None or len(found) == len(payload)


def test_64_megabytes(sender: Transport, receiver: Transport) -> None:
    tensor = torch.arange(16 * MIB, dtype=torch.float32).view(1024, -1)
    assert put(sender, "k", {"x": tensor}) >= 64 * MIB
    assert torch.equal(get(receiver, "k")["x"], tensor)


def test_room_comes_back(sender: Transport, receiver: Transport) -> None:
    """100 times 8 MB through a path that has room for a few of them."""
    tensor = torch.zeros(1, 8 * MIB, dtype=torch.uint8)
    for i in range(100):
        tensor[0, ::65536] = i
        put(sender, "k" if i % 2 else f"{i}", {"x": tensor})
        assert get(receiver, "k" if i % 2 else f"{i}")["x"][0, 65536] == i


def test_a_full_path_says_so_at_once_or_at_its_deadline_and_takes_messages_again(
    sender: Transport, receiver: Transport
) -> None:
    tensor, count = torch.zeros(1, 8 * MIB, dtype=torch.uint8), 0
    with pytest.raises(NoRoomError, match=r"no room for \d+ bytes on edge a->b"):  # noqa: PT012
        while True:
            put(sender, f"{count}", {"x": tensor})
            count += 1
    assert 0 < count < 100
    assert sender.health().status is Status.SICK
    began = monotonic_seconds()
    with pytest.raises(NoRoomError):
        put(sender, "late", {"x": tensor}, deadline=began + 0.02)
    assert monotonic_seconds() >= began + 0.02
    waiting = threading.Thread(target=put, args=(sender, "late", {"x": tensor}, AB, began + 30))
    waiting.start()
    assert get(receiver, "0")["x"].sum() == 0
    waiting.join()
    assert sender.health().status is Status.DEGRADED  # it has refused messages, and works
    for key in [*map(str, range(1, count)), "late"]:
        assert get(receiver, key)["x"].sum() == 0


@pytest.mark.parametrize("kind", [kind for kind in TRANSPORTS if kind is not mooncake], ids=lambda kind: kind.__name__)
def test_what_never_fits_is_refused_before_its_deadline_and_changes_nothing(kind: Kind) -> None:
    """Nothing but a count changes. A Mooncake store also has segments of others, so there it cannot be known."""
    with kind() as open_end:
        path = open_end()
        put(path, "k", {"x": torch.zeros(1, 5000)})
        before, until = _without_counts(path.health().facts), monotonic_seconds() + 1000
        for _ in range(2):
            with pytest.raises(MessageTooLargeError, match="max_bytes"):
                put(path, "large", {"x": np.zeros((1, 800 * MIB), np.uint8)}, deadline=until)
        assert monotonic_seconds() < until
        assert _without_counts(path.health().facts) == before
        assert get(path, "k")["x"].sum() == 0


def _without_counts(facts: dict[str, Any]) -> dict[str, Any]:
    """Room that is set aside and given out, of the path and those it is made of."""
    inner = {name: _without_counts(own) for name, own in facts.items() if isinstance(own, dict) and "status" in own}
    names = ("pools", "ring", "in_flight", "in_flight_bytes", "tier_bytes", "tier_messages", "device_held_bytes")
    return inner | {name: facts[name] for name in names if name in facts}


def test_many_threads_put_and_get_and_nothing_is_lost_or_doubled(sender: Transport, receiver: Transport) -> None:
    threads, each = 4, 100
    gone = threading.Barrier(2 * threads)

    def send(thread: int) -> None:
        gone.wait()
        for i in range(each):
            put(sender, f"{thread}-{i}", {"x": np.full((2, 300), thread * each + i)}, deadline=monotonic_seconds() + 30)

    def receive(thread: int) -> list[int]:
        """Ask for everything, as all the others do."""
        gone.wait()
        found, until = [], monotonic_seconds() + 30
        wanted = [f"{t}-{i}" for t in range(threads) for i in range(each)]
        while len(taken) < threads * each and monotonic_seconds() < until:
            for key in wanted:
                if key not in taken and (arrival := receiver.get(AB, key)) is not None:
                    taken.add(key)
                    values = np.unique(arrival.open()["x"]).tolist()
                    assert len(values) == 1
                    found += values
        return found

    taken: set[str] = set()
    with ThreadPoolExecutor(2 * threads) as pool:
        sent = [pool.submit(send, thread) for thread in range(threads)]
        got = [pool.submit(receive, thread) for thread in range(threads)]
        for future in sent:
            future.result()
        assert sorted(value for future in got for value in future.result()) == list(range(threads * each))


def test_two_receivers_and_two_senders(open_end: Open) -> None:
    senders, receivers = [open_end(), open_end()], [open_end(), open_end()]
    for i in range(40):
        put(senders[i % 2], f"{i}", i)
    found = [arrival.open() for i in range(40) for path in receivers if (arrival := path.get(AB, f"{i}")) is not None]
    assert found == list(range(40))


def test_after_close_nothing_is_taken(open_end: Open) -> None:
    path, other = open_end(), open_end()
    put(path, "k", 1)
    put(path, "large", {"x": torch.ones(1, 5000)})
    assert path.get(AB, "none") is None
    path.close()
    path.close()
    with pytest.raises(TransportClosedError, match="closed"):
        put(path, "l", 1)
    with pytest.raises(TransportClosedError, match="closed"):
        path.get(AB, "k")
    assert (path.discard("k"), path.reap()) == (0, 0)
    assert path.health().status is Status.CLOSED
    assert get(other, "k") == 1  # messages on their way stay
    assert get(other, "large")["x"].sum() == 5000


def test_close_of_a_path_that_did_nothing(open_end: Open) -> None:
    path = open_end()
    assert path.health().status is Status.HEALTHY
    path.close()
    assert path.health().status is Status.CLOSED


def test_views_outlive_the_path_that_got_them(sender: Transport, open_end: Open) -> None:
    receiver, other = open_end(), open_end()
    put(sender, "k", {"x": torch.full((1, 5000), 7)})
    held = get(receiver, "k")["x"]
    receiver.close()
    sender.reap()
    assert other.get(AB, "k") is None  # it was got
    for i in range(30):
        put(sender, f"{i}", {"x": torch.zeros(1, 5000)})
        sender.reap()
    assert held.unique().tolist() == [7]


def test_health_is_true_to_what_happens(sender: Transport, receiver: Transport) -> None:
    assert sender.health().status is Status.HEALTHY
    put(sender, "k", {"x": torch.ones(1, 5000)})
    facts = sender.health().facts
    assert (facts["put"], facts["in_flight"]) == (1, 1)
    del facts
    assert get(receiver, "k")["x"].sum() == 5000
    facts = sender.health().facts
    assert (facts["in_flight"], facts["consumed"]) == (0, 1)
    put(sender, "l", 1)
    sender.discard("l")
    facts = sender.health().facts
    assert (facts["put"], facts["consumed"], facts["discarded"], facts["in_flight"]) == (2, 1, 1, 0)
    assert receiver.health().facts["got"] == 1
    assert sender.health().status is receiver.health().status is Status.HEALTHY
