"""What a sender may ask of all paths: what still waits, and to keep it from receivers while it is put elsewhere."""

from __future__ import annotations

import numpy as np
import torch

from tests.contracts.test_transports import AB, BC, get, put
from vllm_omni_sched.connectors.framing import Arrival, message_of
from vllm_omni_sched.connectors.transport import Transport


def test_holds_says_what_waits(sender: Transport, receiver: Transport) -> None:
    assert not sender.holds(AB, "k")
    for payload in ({"x": torch.ones(1, 5000)}, 1):
        put(sender, "k", payload)
        assert sender.holds(AB, "k")
        assert not sender.holds(BC, "k")
        assert not receiver.holds(AB, "k")  # it has not put it
        held = get(receiver, "k")
        assert not sender.holds(AB, "k")
        del held
    put(sender, "k", 2)
    sender.discard("k")
    assert not sender.holds(AB, "k")


def test_a_lease_keeps_a_message_from_receivers_until_it_is_given_back(sender: Transport, receiver: Transport) -> None:
    assert sender.lease(AB, "k") is None
    for payload in (np.arange(5000), np.arange(3)):
        put(sender, "k", {"x": payload})
        assert receiver.lease(AB, "k") is None  # it has not put it
        for _ in range(2):
            lease = sender.lease(AB, "k")
            assert lease is not None
            assert sender.lease(AB, "k") is None
            assert receiver.get(AB, "k") is None
            sender.reap()
            again = message_of(lease.arrival, BC, "elsewhere")
            assert lease.give_back()
        assert sender.health().facts["in_flight"] == 1
        del lease
        assert get(receiver, "k")["x"].tolist() == payload.tolist()
        del again


def test_a_lease_that_is_consumed_leaves_nothing(sender: Transport, receiver: Transport) -> None:
    for payload in (np.arange(5000), np.arange(3)):
        put(sender, "k", {"x": payload})
        lease = sender.lease(AB, "k")
        assert lease is not None
        again = message_of(lease.arrival, BC, "elsewhere")
        put(sender, "l", 1)
        assert sender.discard("k") == 0  # it is not there to be taken back
        assert np.array_equal(Arrival(again.to_buffer()).open()["x"], payload)
        del again
        lease.consume()
        del lease
        assert receiver.get(AB, "k") is None
        assert get(receiver, "l") == 1
        assert sender.health().facts["in_flight"] == 0


def test_a_message_put_again_during_a_lease_is_another_one(sender: Transport, receiver: Transport) -> None:
    for end in ("consume", "give_back"):
        put(sender, "k", {"x": np.arange(5000)})
        lease = sender.lease(AB, "k")
        assert lease is not None
        put(sender, "k", "new")
        assert not getattr(lease, end)()
        del lease
        assert get(receiver, "k") == "new"
        assert receiver.get(AB, "k") is None
        assert sender.health().facts["in_flight"] == 0


def test_one_message_of_one_edge_is_withdrawn(sender: Transport, receiver: Transport) -> None:
    assert not sender.withdraw(AB, "k")
    for payload in ({"x": torch.ones(1, 5000)}, 1):
        put(sender, "k", payload)
        put(sender, "k", payload, BC)
        assert not receiver.withdraw(AB, "k")  # it has not put it
        assert sender.withdraw(AB, "k")
        assert not sender.withdraw(AB, "k")
        assert not sender.holds(AB, "k")
        assert receiver.get(AB, "k") is None
        assert receiver.get(BC, "k") is not None
        assert not sender.withdraw(BC, "k")
        sender.reap()
        assert sender.health().facts["in_flight"] == 0
