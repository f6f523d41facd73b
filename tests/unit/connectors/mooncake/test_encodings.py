"""Encodings in a Mooncake store: members that die or hang, a master that is gone, and objects that are altered."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.support.arena import Ahead
from tests.support.mooncake import Deployment
from tests.support.mooncake_faults import MIB, SOON, wait_for
from vllm_omni_sched.clock import monotonic_seconds
from vllm_omni_sched.config.errors import ConfigError, RendezvousError
from vllm_omni_sched.config.load import read_options
from vllm_omni_sched.connectors.encodings import ClaimOutcome, PutOutcome, StoreUse
from vllm_omni_sched.connectors.mooncake.encodings import MooncakeEncodings
from vllm_omni_sched.connectors.mooncake.options import SharedStoreOptions

CLAIMS = """
from tests.unit.connectors.mooncake.test_encodings import member_of
from vllm_omni_sched.connectors.encodings import ClaimOutcome
member = member_of(sys.argv[2])
assert member.claim(["a"]) is ClaimOutcome.OURS
member.put("b", b"value")
say("claimed")
sys.stdin.readline()
"""


def member_of(master: str, clock: Any = monotonic_seconds, **options: Any) -> MooncakeEncodings:
    given = {"proto": "tcp", "segment": "16MB", "localbuf": "8MB", "call_timeout_seconds": 1.0, **options}
    return MooncakeEncodings(
        SharedStoreOptions(host="127.0.0.1", master=master, **given),
        "space",
        ttl_seconds=60.0,
        claim_seconds=10.0,
        clock=clock,
    )


@pytest.fixture
def members(own: Deployment) -> Iterator[Any]:
    """Enter the store of a deployment that the test may break."""
    with ExitStack() as stack:

        def enter(**how: Any) -> MooncakeEncodings:
            made = member_of(own.master.address, **how)
            stack.callback(made.close)
            return made

        yield enter


def test_what_a_killed_member_had_claimed_or_put_is_gone_soon(own: Deployment, members: Any) -> None:
    one = members()
    child = own.child(CLAIMS, own.master.address)
    assert child.heard() == "claimed"
    assert one.claim(["a"]) is ClaimOutcome.OTHERS
    assert one.get("b") == b"value"
    child.kill()
    wait_for(lambda: one.claim(["a"]) is ClaimOutcome.OURS)
    wait_for(lambda: not one.has("b"))
    assert one.put("b", b"value") is PutOutcome.STORED


def test_the_claim_of_a_member_that_hangs_is_removed_by_who_waits_for_it(members: Any) -> None:
    clock = Ahead()
    one, other = members(), members(clock=clock)
    one.claim(["a", "b"])
    assert other.claim(["a"]) is ClaimOutcome.OTHERS
    clock.seconds = 9.0
    assert other.claim(["a"]) is ClaimOutcome.OTHERS
    one.release("a")
    one.claim(["a"])  # a new claim, which has not been there for long
    clock.seconds = 11.0
    assert other.claim(["a"]) is ClaimOutcome.OTHERS
    clock.seconds = 22.0
    assert other.claim(["a"]) is ClaimOutcome.OURS
    assert other.claim(["b"]) is ClaimOutcome.OTHERS
    one.put("a", b"late")
    assert other.put("a", b"late") is PutOutcome.KNOWN


def test_a_claim_that_was_put_without_an_answer_is_taken_again(members: Any) -> None:
    one, other = members(), members()
    one.claim(["a"])
    one._claims.clear()  # as after a call that came to an error
    assert other.claim(["a"]) is ClaimOutcome.OTHERS
    assert one.claim(["a"]) is ClaimOutcome.OURS
    one.release("a")
    assert other.claim(["a"]) is ClaimOutcome.OURS


def test_without_a_master_every_call_fails_in_time(own: Deployment, members: Any) -> None:
    one = members()
    one.claim(["a"])
    own.master.kill()
    began = time.monotonic()
    for call in (
        lambda: one.has("a"),
        lambda: one.get("a"),
        lambda: one.claim(["b"]),
        lambda: one.release("a"),
        lambda: one.put("a", b"value"),
        one.tidy,
    ):
        with pytest.raises(RendezvousError):
            call()
    one.close()
    assert time.monotonic() - began < 4 * SOON


def test_a_master_that_has_restarted_serves_on(own: Deployment, members: Any) -> None:
    one = members()
    one.put("a", b"value")
    own.master.kill()
    with pytest.raises(RendezvousError):
        one.get("a")
    own.master.start()

    def stored() -> bool:
        try:
            return one.put("b", b"value") in (PutOutcome.STORED, PutOutcome.KNOWN)
        except RendezvousError:
            return False

    wait_for(stored, 4 * SOON)
    assert one.get("b") == b"value"


def test_an_object_that_is_not_the_encoding_is_none(members: Any) -> None:
    one, other = members(), members()
    one.put("a", b"value")
    written = one._store.size(one._encoding("a"))
    data = bytearray(one._read(one._encoding("a"), written))
    for key, altered in {"other key": data, "altered": data[:-1] + b"!", "short": data[:10]}.items():
        room = one._room(len(altered))
        room.data[:] = altered
        assert one._add(one._encoding(key), room, len(altered)) == 0
        assert other.get(key) is None
    assert other.get("a") == b"value"


def test_what_is_being_read_is_not_evicted(members: Any) -> None:
    one, other = members(), members()
    quarter = 4 * MIB - 1000
    one.max_bytes = 16 * MIB
    for key in "abc":
        assert one.put(key, key.encode() * quarter) is PutOutcome.STORED
    assert other.get("a") == b"a" * quarter
    assert one.put("d", bytes(2 * quarter)) is PutOutcome.STORED
    assert [key for key in "abcd" if one.has(key)] == ["a", "c", "d"]  # not the oldest one
    assert one.use() == StoreUse(3, one.use().num_bytes)
    assert one.use().num_bytes <= one.max_bytes


def test_a_member_that_lends_nothing_puts_where_others_have_room(members: Any) -> None:
    one, poor = members(), members(segment=0)
    assert poor.put("a", b"value") is PutOutcome.STORED
    assert one.get("a") == b"value"
    assert poor.claim(["b"]) is ClaimOutcome.OURS
    assert one.claim(["b"]) is ClaimOutcome.OTHERS


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"master": "10.0.0.1:50051"}, "encoder_share_store.host"),
        ({"host": "10.0.0.2"}, "encoder_share_store.master"),
        ({"host": "10.0.0.2", "master": "10.0.0.1"}, "encoder_share_store.master"),
        ({"host": "10.0.0.2", "master": "10.0.0.1:1", "ttl_seconds": 3}, "encoder_share_store.ttl_seconds"),
        ({"host": "10.0.0.2", "master": "10.0.0.1:1", "segment": "much"}, "encoder_share_store.segment"),
        ({"host": "10.0.0.2", "master": "10.0.0.1:1", "namespace": "a/b"}, "encoder_share_store.namespace"),
    ],
)
def test_an_option_that_cannot_be_used_is_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_options(SharedStoreOptions, options, group="encoder_share_store")
