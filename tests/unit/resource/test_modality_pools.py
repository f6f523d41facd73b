"""Memory pools by modality: lending, getting back, and shares that follow the demand."""

import math

import pytest

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.resource.pipeline.modality_pools import Grant, MovingShares, Pools, Refusal, ShareReason

HALVES = {"image": 0.5, "audio": 0.5}


def got(pools, modality, num_bytes):
    grant = pools.reserve(modality, num_bytes)
    assert isinstance(grant, Grant)
    return grant


def why(answer):
    return answer.reason.value


def test_own_bytes_then_borrowed_ones_then_none():
    pools = Pools(100, HALVES)
    assert [why(pools.reserve("image", n)) for n in (50, 30)] == ["own", "borrowed"]
    assert pools.reserve("image", 21) == Refusal("no_room", 1)
    assert pools.reserve("image", 101) == Refusal("too_large", 1)
    assert (pools.used_bytes("image"), pools.free_bytes) == (80, 20)


def test_what_was_lent_comes_back_to_its_owner_and_to_nobody_else():
    pools = Pools(100, HALVES)
    first, second, third = (got(pools, "image", n) for n in (50, 25, 25))
    assert pools.reserve("audio", 30) == Refusal("lent", 30)
    assert pools.release(third)
    assert why(pools.reserve("image", 10)) == "no_room"  # free, but claimed
    assert pools.reserve("audio", 30) == Refusal("lent", 5)
    assert pools.release(second)
    assert why(pools.reserve("audio", 30)) == "own"
    assert why(pools.reserve("image", 20)) == "borrowed"  # what is left
    assert pools.release(first)
    assert not pools.release(first)


def test_a_claim_that_nobody_repeats_lapses():
    pools = Pools(100, HALVES)
    lent = got(pools, "image", 100)
    assert why(pools.reserve("audio", 30)) == "lent"
    pools.release(lent)
    assert why(pools.reserve("image", 80)) == "no_room"
    pools.adapt()
    assert why(pools.reserve("image", 80)) == "no_room"
    pools.adapt()
    assert why(pools.reserve("image", 80)) == "borrowed"


def test_without_a_share_a_modality_lives_on_what_is_lent():
    pools = Pools(100, {"image": 0.6, "video": 0.0})
    lent = got(pools, "video", 90)
    assert why(lent) == "borrowed"
    assert pools.reserve("image", 60) == Refusal("lent", 50)
    assert pools.reserve("video", 10) == Refusal("no_room", 10 + 50)  # what is free waits for its owner
    pools.release(lent)
    assert why(got(pools, "image", 60)) == "own"
    for _ in range(20):
        pools.adapt()
        assert pools.shares == {"image": 0.6, "video": 0.0}
        assert why(got(pools, "video", 1)) == "borrowed"


def test_without_any_shares_all_is_lent_to_who_comes_first():
    pools = Pools(100, {"image": 0.0, "video": 0.0})
    assert [why(pools.reserve("image", 100)), why(pools.reserve("video", 1))] == ["borrowed", "no_room"]
    assert pools.adapt() is ShareReason.NO_DEMAND


def test_shares_follow_a_lasting_demand_and_keep_a_rest_for_each():
    pools = Pools(1000, HALVES)
    got(pools, "image", 900)
    reasons = [pools.adapt().value for _ in range(20)]
    assert reasons[:4] == ["waiting", "waiting", "moved", "moved"]
    assert reasons[-1] == "close_enough"
    assert 0.88 <= pools.shares["image"] <= 0.95 + 1e-9
    assert sum(pools.shares.values()) == pytest.approx(1)
    assert pools.guaranteed_bytes("image") == int(1000 * pools.shares["image"])


def test_shares_do_not_follow_a_demand_that_only_wavers():
    pools = Pools(1000, HALVES)
    for number in range(30):
        big, small = ("image", "audio") if number % 2 else ("audio", "image")
        for grant in [got(pools, big, 300), got(pools, small, 200)]:
            pools.release(grant)
        assert pools.adapt().value in ("close_enough", "waiting")
    assert pools.shares == HALVES


def test_without_demand_nothing_moves():
    pools = Pools(100, HALVES)
    assert pools.adapt().value == "no_demand"
    assert pools.shares == HALVES


def test_one_step_moves_no_share_further_than_it_may():
    moving = MovingShares(weight=1, patience=1, max_move=0.02)
    shares, reason = moving.next({"a": 0.2, "b": 0.3, "c": 0.5}, {"a": 1, "b": 0, "c": 0})
    assert reason is ShareReason.MOVED
    assert shares == pytest.approx({"a": 0.22, "b": 0.2928571, "c": 0.4871428})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Pools(0), "total_bytes"),
        (lambda: Pools(1, {}), "one modality"),
        (lambda: Pools(1, {"a": -0.1}), "share of 'a'"),
        (lambda: Pools(1, {"a": math.nan}), "share of 'a'"),
        (lambda: Pools(1, {"a": 0.6, "b": 0.6}), "add up to at most 1, got 1.2"),
        *(
            (lambda name=name, bad=bad: MovingShares(**{name: bad}), name)
            for name, bad in [("weight", 0), ("max_move", 2), ("least_share", -1), ("hysteresis", 1), ("patience", 0)]
        ),
    ],
)
def test_bad_options_are_refused_by_name(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_wrong_calls_are_refused():
    with pytest.raises(ValueError, match="unknown modality 'smell'"):
        Pools(1).reserve("smell", 1)
    with pytest.raises(ValueError, match="num_bytes"):
        Pools(1).reserve("text", -1)
