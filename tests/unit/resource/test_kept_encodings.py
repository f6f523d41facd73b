"""The host tier's books."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni_sched.resource.engine.host_tier import Encoding, HostReason, HostTier


def encoding(name="a", size=10, seconds=1.0):
    return Encoding(name, size, seconds)


@pytest.mark.parametrize(
    ("kept", "held", "new", "restore", "keep", "reason", "dropped"),
    [
        ([], "", encoding(), 0.1, True, "restore_is_quicker", ""),
        ([encoding()], "", encoding(), 0.1, True, "already_kept", ""),
        ([], "", encoding(), 1.0, False, "encode_is_quicker", ""),
        ([], "", encoding(size=31), 0.1, False, "too_large", ""),
        ([encoding("b", 30)], "", encoding(), 0.1, True, "restore_is_quicker", "b"),
        ([encoding("b", 30)], "b", encoding(), 0.1, False, "in_use", ""),
        # no more than is needed, and the oldest first
        ([encoding("b"), encoding("c"), encoding("d")], "", encoding(), 0.1, True, "restore_is_quicker", "b"),
        ([encoding("b"), encoding("c"), encoding("b"), encoding("d")], "", encoding(), 0.1, True,
         "restore_is_quicker", "c"),
        ([encoding("b"), encoding("c"), encoding("d")], "b", encoding("a", 20), 0.1, True, "restore_is_quicker", "cd"),
        # one would go, the other may not: then neither does
        ([encoding("b", 15), encoding("c", 15)], "c", encoding("a", 20), 0.1, False, "in_use", ""),
    ],
)  # fmt: skip
def test_host_tier(kept, held, new, restore, keep, reason, dropped):
    tier = HostTier(max_bytes=30)
    for one in kept:
        assert tier.offer(one, 0.1).keep
    for name in held:
        tier.hold(name)
    decision = tier.offer(new, restore)
    assert (decision.keep, decision.reason.value, "".join(decision.dropped)) == (keep, reason, dropped)
    assert {n for n in "abcd" if n in tier} == {one.mm_hash for one in kept} - set(dropped) | ({"a"} if keep else set())


host_operations = st.lists(
    st.tuples(
        st.sampled_from(["offer", "offer", "offer", "hold", "release", "drop"]),
        st.integers(0, 9),
        st.integers(1, 60),
        st.integers(0, 6),
    ),
    max_size=150,
)


@settings(deadline=None)
@given(host_operations, st.integers(0, 150))
def test_host_tier_keeps_its_bound_and_drops_the_oldest_that_is_not_held(operations, max_bytes):
    tier, kept, held = HostTier(max_bytes), {}, []
    for operation, number, size, seconds in operations:
        name = f"h{number}"
        if operation == "offer":
            decision = tier.offer(encoding(name, size, float(seconds)), 1.0)
            assert not set(decision.dropped) & set(held)
            free = [one for one in kept if one not in held]
            assert list(decision.dropped) == free[: len(decision.dropped)]
            for gone in decision.dropped:
                del kept[gone]
            if decision.keep:
                kept[name] = kept.pop(name, size)
            if decision.reason is HostReason.IN_USE:
                assert sum(kept[one] for one in set(held)) + size > max_bytes
        elif operation == "hold" and name in kept:
            assert tier.hold(name).mm_hash == name
            kept[name] = kept.pop(name)
            held.append(name)
        elif operation == "release" and name in held:
            tier.release(name)
            held.remove(name)
        elif operation == "drop" and name in kept and name not in held:
            tier.drop(name)
            del kept[name]
        assert tier.num_bytes == sum(kept.values()) <= max_bytes
        assert len(tier) == len(kept)


def raising(error, message, call):
    with pytest.raises(error, match=message):
        call()


def test_bad_use():
    tier = HostTier(10)
    raising(ValueError, "num_bytes", lambda: encoding(size=0))
    raising(ValueError, "encode_seconds", lambda: encoding(seconds=math.nan))
    raising(ValueError, "restore_seconds", lambda: tier.offer(encoding(), -1))
    raising(KeyError, "b", lambda: tier.hold("b"))
    raising(ValueError, "released more often", lambda: tier.release("b"))
    tier.offer(encoding(), 0.1)
    tier.hold("a")
    tier.hold("a")
    tier.release("a")
    raising(ValueError, "being restored", lambda: tier.drop("a"))
    tier.release("a")
    tier.drop("a")
