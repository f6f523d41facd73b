"""Eviction by worth, and the host tier's books."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.resource.engine.host_tier import HostReason, HostTier
from vllm_omni_sched.resource.engine.worth import Encoding, EvictionOrder, EvictReason, Uses, WorthIndex


def filled(index, *encodings):
    """Encodings of (hash, bytes, seconds, times of use), none of them held."""
    for name, size, seconds, *times in encodings:
        index.add(name, size, seconds, times[0])
        index.release(name)
        for at in times[1:]:
            index.use(name, at)
            index.release(name)
    return index


def evicted(index):
    return "".join(v.encoding.mm_hash for v in iter(index.evict, None))


@pytest.mark.parametrize(
    ("encodings", "by_worth"),
    [
        ([("a", 100, 2.0, 0), ("b", 100, 1.0, 0)], "ba"),  # cheaper to make again
        ([("a", 100, 1.0, 0), ("b", 200, 1.0, 0)], "ba"),  # larger
        ([("a", 100, 1.0, 0, 0), ("b", 100, 1.0, 0)], "ba"),  # used less
        ([("a", 100, 1.0, 0, 0, 0), ("b", 100, 1.0, 25)], "ab"),  # long ago: 3 / 2^2.5 uses against 1
        ([("a", 100, 1.0, 0, 0, 0), ("b", 100, 1.0, 15)], "ba"),  # 3 / 2^1.5 against 1
        ([("a", 100, 1.0, 0), ("b", 100, 1.0, 0)], "ab"),  # tie: freeable first
        ([("a", 1, 9.0, 0), ("b", 9, 0.0, 0)], "ba"),  # costs nothing
    ],
)
def test_order(encodings, by_worth):
    assert evicted(filled(WorthIndex(half_life_seconds=10), *encodings)) == by_worth
    index = filled(WorthIndex(EvictionOrder.AGE), *encodings)
    assert index.next_victim().reason is EvictReason.OLDEST
    assert evicted(index) == "ab"


def test_decayed_uses():
    uses = Uses(half_life_seconds=10)
    log_uses = uses.add(uses.add(-math.inf, 0.0), 10.0)
    assert uses.count(log_uses, 10.0) == pytest.approx(1.5)
    assert uses.count(log_uses, 20.0) == pytest.approx(0.75)
    late = uses.add(log_uses, 1e9)  # far beyond what a float could hold
    assert uses.count(late, 1e9) == pytest.approx(1.0)


def test_what_comes_back_is_not_new_and_the_memory_of_it_is_bounded():
    index = filled(WorthIndex(half_life_seconds=10, history=2), ("a", 1, 1.0, 0, 0, 0))
    index.evict()
    assert "a" not in index
    assert index.uses.count(index.add("a", 1, 1.0, 0.0).log_uses, 0.0) == pytest.approx(4)
    index.release("a")
    filled(index, *((n, 1, 1.0, 1) for n in "bcd"))
    evicted(index)
    assert index.num_remembered == 2
    forgetful = filled(WorthIndex(history=0), ("a", 1, 1.0, 0, 0))
    forgetful.evict()
    assert forgetful.uses.count(forgetful.add("a", 1, 1.0, 0.0).log_uses, 0.0) == pytest.approx(1)


operations = st.lists(
    st.tuples(st.sampled_from(["add", "use", "release", "evict"]), st.integers(0, 7), st.integers(0, 3)), max_size=120
)


@settings(deadline=None)
@given(operations, st.sampled_from(EvictionOrder))
def test_the_victim_is_free_and_worth_least(operations, order):
    """Against a model that counts holders and compares all candidates."""
    index, now = WorthIndex(order, half_life_seconds=5), 0.0
    held, known, freed_at = {}, {}, {}
    for turn, (operation, number, passed) in enumerate(operations):
        name, now = f"h{number}", now + passed
        if operation == "add" and name not in held:
            known[name] = index.add(name, 10 * number + 1, 1.0 + number % 3, now)
            held[name] = 1
        elif operation == "use" and name in held:
            known[name] = index.use(name, now)
            held[name] += 1
        elif operation == "release" and held.get(name):
            index.release(name)
            held[name] -= 1
            freed_at[name] = turn
        elif operation == "evict":
            free = [n for n, holders in held.items() if not holders]
            victim = index.evict()
            assert (victim is None) == (not free)
            if victim:
                gone = victim.encoding.mm_hash
                rank = (lambda n: known[n].log_worth()) if order is EvictionOrder.WORTH else freed_at.__getitem__
                assert gone in free
                assert rank(gone) == min(map(rank, free))
                del held[gone]
        assert len(index) == len(held)
        assert index.num_freeable == sum(not holders for holders in held.values())


def test_an_order_of_worth_does_not_change_with_time_alone():
    """So the heap needs no upkeep: worth at any later moment ranks as it did."""
    uses = Uses(3.0)
    a, b = uses.add(-math.inf, 1.0), uses.add(uses.add(-math.inf, 0.0), 0.0)
    assert {uses.count(a, t) < uses.count(b, t) for t in (1.0, 5.0, 50.0)} == {True}


def test_stale_entries_are_swept():
    index = filled(WorthIndex(), ("a", 1, 1.0, *range(5000)))
    assert len(index._heap) < 100


def encoding(name="a", size=10, seconds=1.0, log_uses=0.0):
    return Encoding(name, size, seconds, log_uses)


@pytest.mark.parametrize(
    ("kept", "held", "new", "restore", "keep", "reason", "dropped"),
    [
        ([], "", encoding(), 0.1, True, "restore_is_quicker", ""),
        ([encoding()], "", encoding(), 0.1, True, "already_kept", ""),
        ([], "", encoding(), 1.0, False, "encode_is_quicker", ""),
        ([], "", encoding(size=31), 0.1, False, "too_large", ""),
        ([encoding("b", 30)], "", encoding(seconds=5.0), 0.1, True, "restore_is_quicker", "b"),
        ([encoding("b", 30, 9.0, 9.0)], "", encoding(), 0.1, False, "not_worth_the_room", ""),
        ([encoding("b", 30)], "b", encoding(seconds=5.0), 0.1, False, "in_use", ""),
        (
            [encoding("b"), encoding("c"), encoding("d")],
            "b",
            encoding("a", 20, 9.0),
            0.1,
            True,
            "restore_is_quicker",
            "cd",
        ),
        # one would go, the other may not: then neither does
        (
            [encoding("b", 15), encoding("c", 15, 99.0)],
            "",
            encoding("a", 20, 9.0),
            0.1,
            False,
            "not_worth_the_room",
            "",
        ),
        ([encoding("b", 10, 1.0, -5.0), encoding("c", 20, 9.0)], "", encoding(), 0.1, True, "restore_is_quicker", "b"),
        # equal worth stays
        ([encoding("b", 30)], "", encoding("a", 30), 0.1, False, "not_worth_the_room", ""),
    ],
)
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
        st.integers(-3, 3),
    ),
    max_size=150,
)


@settings(deadline=None)
@given(host_operations, st.integers(0, 150))
def test_host_tier_keeps_its_bound_and_drops_nothing_held_or_worth_more(operations, max_bytes):
    tier, kept, held = HostTier(max_bytes), {}, []
    for operation, number, size, seconds, log_uses in operations:
        name = f"h{number}"
        if operation == "offer":
            new = encoding(name, size, float(seconds), float(log_uses))
            decision = tier.offer(new, 1.0)
            assert not set(decision.dropped) & set(held)
            if decision.keep and decision.reason is not HostReason.ALREADY_KEPT:
                worth = replace(new, encode_seconds=new.encode_seconds - 1).log_worth()
                rest = [w for n, (_, w) in kept.items() if n not in held and n not in decision.dropped]
                for gone in decision.dropped:
                    lost = kept.pop(gone)[1]
                    assert lost < worth
                    assert all(lost <= w for w in rest)
                kept[name] = size, worth
            else:
                assert not decision.dropped
                if decision.keep and new.encode_seconds > 1:  # it was used again since
                    kept_bytes = kept[name][0]
                    again = replace(new, num_bytes=kept_bytes, encode_seconds=new.encode_seconds - 1)
                    kept[name] = kept_bytes, again.log_worth()
        elif operation == "hold" and name in kept:
            assert tier.hold(name).mm_hash == name
            held.append(name)
        elif operation == "release" and name in held:
            tier.release(name)
            held.remove(name)
        elif operation == "drop" and name in kept and name not in held:
            tier.drop(name)
            del kept[name]
        assert tier.num_bytes == sum(size for size, _ in kept.values()) <= max_bytes
        assert len(tier) == len(kept)


def test_what_was_restored_and_used_again_is_worth_more_than_when_it_came():
    tier = HostTier(20)
    tier.offer(encoding("a"), 0.1)
    tier.offer(encoding("b", log_uses=1.0), 0.1)
    assert tier.offer(encoding("a", log_uses=2.0), 0.1).reason is HostReason.ALREADY_KEPT
    assert tier.offer(encoding("c", seconds=9.0), 0.1).dropped == ("b",)


def test_host_tier_sweeps():
    tier = HostTier(100)
    for _ in range(1000):
        tier.offer(encoding(), 0.1)
        tier.drop("a")
    assert len(tier._heap) < 100
    tier.offer(encoding(), 0.1)
    for uses in range(1000):
        tier.offer(encoding(log_uses=uses), 0.1)
    assert len(tier._heap) < 100


def raising(error, message, call):
    with pytest.raises(error, match=message):
        call()


def test_bad_use():
    index, tier = filled(WorthIndex(), ("a", 1, 1.0, 0)), HostTier(10)
    raising(ValueError, "a is in the cache already", lambda: index.add("a", 1, 1.0, 0))
    raising(ValueError, "released more often", lambda: index.release("a"))
    raising(KeyError, "b", lambda: index.use("b", 0))
    raising(KeyError, "b", lambda: index.release("b"))
    raising(ConfigError, "history", lambda: WorthIndex(history=-1))
    raising(ConfigError, "half_life_seconds", lambda: WorthIndex(half_life_seconds=0))
    raising(ValueError, "num_bytes", lambda: encoding(size=0))
    raising(ValueError, "encode_seconds", lambda: encoding(seconds=math.nan))
    raising(ConfigError, "max_bytes", lambda: HostTier(-1))
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


def test_all_users_may_let_go_at_once():
    index = filled(WorthIndex(), ("a", 1, 1.0, 0))
    raising(ValueError, "released more often", lambda: index.release_all("a"))
    index.use("a", 0.0)
    index.use("a", 0.0)
    assert index.next_victim() is None
    index.release_all("a")
    assert index.next_victim().encoding.mm_hash == "a"


def test_a_use_may_tell_what_the_encoding_costs_by_now():
    index = filled(WorthIndex(), ("a", 1, 1.0, 0), ("b", 1, 2.0, 0, 0))
    index.use("a", 0.0, encode_seconds=9.0)
    index.release("a")
    assert evicted(index) == "ba"


def test_what_is_used_again_is_no_victim():
    index = filled(WorthIndex(), ("a", 1, 1.0, 0), ("b", 1, 9.0, 0))
    index.use("a", 1.0)
    assert index.num_freeable == 1
    assert evicted(index) == "b"
    index.release("a")
    assert evicted(index) == "a"
