"""Check the numbered promises of `SharedStore` on the store of a host and on the one between hosts."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from unittest.mock import patch

import pytest

from tests.support.mooncake import why_not
from tests.support.transport_kinds import mooncake, mooncake_deployment
from vllm_omni_sched.clock import sleep_seconds
from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.encodings import ClaimOutcome, EncodingStore, PutOutcome, SharedStore
from vllm_omni_sched.connectors.framing import make_message
from vllm_omni_sched.connectors.mooncake import store as mooncake_store
from vllm_omni_sched.connectors.mooncake.encodings import MooncakeEncodings
from vllm_omni_sched.connectors.mooncake.options import SharedStoreOptions

MOST_BYTES = 900 << 10
Enter = Callable[..., SharedStore]
Kind = Callable[[], AbstractContextManager[Enter]]


@contextmanager
def _closed(make: Enter) -> Iterator[Enter]:
    """Close the members of a store at the end."""
    members: list[SharedStore] = []

    def enter(space: str = "space", *, ttl_seconds: float = 3600.0) -> SharedStore:
        members.append(make(space, ttl_seconds))
        return members[-1]

    try:
        yield enter
    finally:
        for member in members:
            member.close()


@contextmanager
def host() -> Iterator[Enter]:
    with tempfile.TemporaryDirectory() as folder:

        def make(space: str, ttl_seconds: float) -> SharedStore:
            return EncodingStore(folder, space, max_bytes=MOST_BYTES, ttl_seconds=ttl_seconds)

        with _closed(make) as enter:
            yield enter


@contextmanager
def between_hosts() -> Iterator[Enter]:
    """Open clients of a real master, in a network namespace."""
    if reason := why_not():
        pytest.skip(reason)
    deployment, clients = mooncake_deployment()
    namespace = secrets.token_hex(4)
    options = SharedStoreOptions(
        host="127.0.0.1",
        master=deployment.master.address,
        proto="tcp",
        segment="16MB",
        localbuf="8MB",
        namespace=namespace,
    )

    def make(space: str, ttl_seconds: float) -> SharedStore:
        made = MooncakeEncodings(options, space, ttl_seconds=ttl_seconds, claim_seconds=60.0)
        made.max_bytes = MOST_BYTES
        return made

    with deployment.inside(), patch.object(mooncake_store, "load_library", clients):
        with _closed(make) as enter:
            yield enter
        clients.clear(namespace)


STORES: list[Kind] = [host, between_hosts]


@pytest.fixture(params=STORES, ids=lambda kind: kind.__name__)
def enter(request: pytest.FixtureRequest) -> Iterator[Enter]:
    kind: Kind = request.param
    with kind() as enter:
        yield enter


def test_what_one_puts_all_can_get(enter: Enter) -> None:
    one, other, elsewhere = enter(), enter(), enter("another")
    value = secrets.token_bytes(100_000)
    assert one.get("key") is None
    assert one.put("key", value) is PutOutcome.STORED
    assert other.has("key")
    assert one.get("key") == other.get("key") == value
    assert not elsewhere.has("key")
    assert elsewhere.get("key") is None


def test_an_empty_encoding_is_one(enter: Enter) -> None:
    one, other = enter(), enter()
    assert one.put("key", b"") is PutOutcome.STORED
    assert other.get("key") == b""


def test_a_key_is_stored_once_and_never_changed(enter: Enter) -> None:
    one, other = enter(), enter()
    assert one.put("key", b"value") is PutOutcome.STORED
    assert other.put("key", b"another") is PutOutcome.KNOWN
    assert other.get("key") == b"value"


def test_a_claim_takes_all_or_nothing(enter: Enter) -> None:
    one, other = enter(), enter()
    one.put("stored", b"1")
    assert one.claim(["stored", "a"]) is ClaimOutcome.OURS
    assert one.claim(["a"]) is ClaimOutcome.OURS  # it has it already
    assert other.claim(["b", "a"]) is ClaimOutcome.OTHERS
    assert other.claim(["a", "b"]) is ClaimOutcome.OTHERS
    assert one.claim(["b"]) is ClaimOutcome.OURS  # the other has not kept it
    other.release("a")  # not its own
    assert other.claim(["a"]) is ClaimOutcome.OTHERS
    one.release("a")
    assert other.claim(["a"]) is ClaimOutcome.OURS
    assert one.claim(["b", "a"]) is ClaimOutcome.OTHERS


def test_what_is_put_or_cannot_be_put_is_claimed_no_more(enter: Enter) -> None:
    one, other = enter(), enter()
    assert one.claim(["a", "large"]) is ClaimOutcome.OURS
    assert one.put("a", b"1") is PutOutcome.STORED
    assert one.put("large", bytes(MOST_BYTES + 1)) is PutOutcome.TOO_LARGE
    assert other.claim(["a", "large"]) is ClaimOutcome.OURS
    assert other.get("a") == b"1"
    assert other.get("large") is None


def test_what_a_member_that_left_had_claimed_is_free_again(enter: Enter) -> None:
    one, other = enter(), enter()
    one.claim(["a"])
    assert other.claim(["a"]) is ClaimOutcome.OTHERS
    one.close()
    one.close()
    assert other.claim(["a"]) is ClaimOutcome.OURS


def test_a_member_keeps_its_bound(enter: Enter) -> None:
    one = enter()
    for number in range(30):
        assert one.put(f"{number}", bytes([number]) * 100_000) in (PutOutcome.STORED, PutOutcome.NO_ROOM)
    there = [number for number in range(30) if one.has(f"{number}")]
    assert 1 <= len(there) <= MOST_BYTES // 100_000
    assert all(one.get(f"{number}") == bytes([number]) * 100_000 for number in there)


def test_what_has_expired_leaves(enter: Enter) -> None:
    one, other = enter(ttl_seconds=1e-6), enter(ttl_seconds=1e-6)
    assert one.put("key", b"value") is PutOutcome.STORED
    for _ in range(1000):  # the clock of a file system ticks every few milliseconds
        one.tidy()
        if not other.has("key"):
            break
        sleep_seconds(0.005)
    assert other.get("key") is None


def test_a_stage_beside_a_member_lends_the_store_the_segment_of_its_own_options() -> None:
    """Clients are used again in these tests, but not those with a segment of another size."""
    with between_hosts() as enter:
        assert enter().put("key", b"value") is PutOutcome.STORED
    with mooncake() as open_end:
        assert open_end().put(make_message(Edge("a", "b"), "key", bytes(64 << 20))) > 64 << 20
