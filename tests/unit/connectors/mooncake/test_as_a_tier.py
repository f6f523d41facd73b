"""A Mooncake store below an arena: what moves there and back."""

from __future__ import annotations

import time

import numpy as np

from tests.support.arena import KIB, LONG, MIB, pixels, place, small
from tests.support.mooncake import Deployment, received
from tests.support.tiers import expect, files
from vllm_omni_sched.connectors.arena import ArenaTransport
from vllm_omni_sched.connectors.disk import DiskTransport
from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.framing import make_message
from vllm_omni_sched.connectors.mooncake import MooncakeTransport
from vllm_omni_sched.connectors.tiers import Tier, TieredTransport, TiersOptions

EDGE = Edge("0", "1")
PAYLOAD = 90 * KIB


def over(root: str, store: MooncakeTransport) -> TieredTransport:
    tiers = [
        Tier(ArenaTransport(small(root)), {"text": MIB, "image": MIB, "audio": MIB}),
        Tier(store, {"": 2 * MIB}),
        Tier(DiskTransport(files(root)), {"": 96 * MIB}),
    ]
    return TieredTransport(tiers, TiersOptions(min_bytes=0, high_water=0.5, low_water=0.3), background=False)


def test_a_path_tells_what_waits_and_leases_it(shared: Deployment, inside: None) -> None:
    sender, receiver = shared.path(), shared.path()
    assert not sender.holds(EDGE, "waits")
    for _ in range(2):
        sender.put(make_message(EDGE, "waits", pixels(7, PAYLOAD)))
        assert sender.holds(EDGE, "waits")
        lease = sender.lease(EDGE, "waits")
        assert lease is not None
        assert not sender.holds(EDGE, "waits")
        assert receiver.get(EDGE, "waits") is None
        assert lease.give_back()
        assert sender.holds(EDGE, "waits")
        assert received(receiver, EDGE, "waits").min() == 7
        sender.reap()
        assert not sender.holds(EDGE, "waits")


def test_messages_move_through_three_tiers_and_are_got_once(shared: Deployment, inside: None) -> None:
    with place() as root:
        sender, receiver = over(root, shared.path()), over(root, shared.path())
        for i in range(40):
            sender.put(make_message(EDGE, f"m{i}", pixels(i, PAYLOAD)))
            sender.move()
        facts = sender.health().facts
        assert set(facts["moved"]) >= {"arena->mooncake high_water", "arena->disk high_water"}
        assert min(facts["tier_messages"].values()) > 0
        assert facts["moves_failed"] == facts["refused"] == 0
        for i in range(30):
            got = received(receiver, EDGE, f"m{i}")
            assert np.array_equal(got, pixels(i, PAYLOAD))
            assert receiver.get(EDGE, f"m{i}") is None
            del got
        expect(sender, LONG)  # longer than they have waited, and not much: they are needed soon
        sender._view._rules = sender._view._rules.model_copy(update={"soon_seconds": LONG})
        until = time.monotonic() + 60
        while sender.health().facts["tier_messages"]["arena"] < 3 and time.monotonic() < until:
            sender.move()
        assert any(name.endswith("->arena expected_soon") for name in sender.health().facts["moved"])
        assert sender.discard("m39") == 1
        for i in range(30, 39):
            assert received(receiver, EDGE, f"m{i}").min() == i
        assert receiver.get(EDGE, "m39") is None
        sender.reap()
        assert sender.health().facts["in_flight"] == 0
        for path in (sender, receiver):
            path.close()
