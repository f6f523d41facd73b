"""A Mooncake store between an arena and files."""

from __future__ import annotations

import numpy as np

from tests.support.arena import KIB, pixels, place, small
from tests.support.mooncake import Deployment, received
from tests.support.tiers import files
from vllm_omni_sched.connectors.arena import ArenaTransport
from vllm_omni_sched.connectors.disk import DiskTransport
from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.framing import make_message
from vllm_omni_sched.connectors.mooncake import MooncakeTransport
from vllm_omni_sched.connectors.tiers import TieredTransport

EDGE = Edge("0", "1")
PAYLOAD = 90 * KIB


def over(root: str, store: MooncakeTransport) -> TieredTransport:
    return TieredTransport([ArenaTransport(small(root)), store, DiskTransport(files(root))])


def test_messages_lie_in_three_tiers_and_are_got_once(shared: Deployment, inside: None) -> None:
    with place() as root:
        sender, receiver = (over(root, shared.path(segment="16MB")) for _ in range(2))
        count = 0
        while not sender.health().facts["tier_messages"]["disk"]:
            sender.put(make_message(EDGE, f"m{count}", pixels(count % 251, PAYLOAD)))
            count += 1
        assert min(sender.health().facts["tier_messages"].values()) > 0
        assert sender.discard(f"m{count - 1}") == 1
        for i in range(count - 1):
            got = received(receiver, EDGE, f"m{i}")
            assert np.array_equal(got, pixels(i % 251, PAYLOAD))
            assert receiver.get(EDGE, f"m{i}") is None
            del got
        sender.reap()
        assert sender.health().facts["in_flight"] == 0
        for path in (sender, receiver):
            path.close()
