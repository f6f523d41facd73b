"""Whatever comes, `EncodeRounds` lets every item be encoded in a bounded time, and decides the same again."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_omni_sched.resource.engine.encode_rounds import HOLDS, EncodeRounds, PromptWork, RoundReason, RoundSnapshot

SETTINGS = settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
SECONDS = st.floats(0.0, 5.0)
PROMPTS = st.lists(
    st.builds(
        PromptWork,
        st.sampled_from("abcdef"),
        SECONDS,
        SECONDS,
        st.floats(-10.0, 40.0),
        runs=st.booleans(),
        reached=st.booleans(),
    ),
    max_size=6,
    unique_by=lambda one: one.key,
)
SNAPSHOTS = st.builds(
    RoundSnapshot,
    st.integers(0, 20),
    st.integers(0, 20),
    st.floats(0.001, 1.0),
    PROMPTS.map(tuple),
    st.integers(0, 4096),
    st.floats(0.0, 0.2),
    st.floats(0.0, 0.001),
)


def decisions(policy: EncodeRounds, snapshot: RoundSnapshot, now: float) -> list[RoundReason]:
    step = policy.step(snapshot, now)
    return [
        step.encode(one.key, one.encode_seconds, one.prefill_seconds, one.deadline)
        for one in snapshot.prompts
        if one.encode_seconds
    ]


@SETTINGS
@given(st.lists(st.tuples(st.floats(0.0, 4.0), SNAPSHOTS), max_size=8))
def test_no_item_is_held_longer_than_the_bound(history: list[tuple[float, RoundSnapshot]]):
    policy, now, since = EncodeRounds(max_wait_seconds=5.0), 0.0, {}
    for seconds, snapshot in history:
        now += seconds
        asked = [one for one in snapshot.prompts if one.encode_seconds]
        for one, reason in zip(asked, decisions(policy, snapshot, now), strict=True):
            if reason in HOLDS:
                assert now - since.setdefault(one.key, now) < 5.0
            else:
                since.pop(one.key, None)
    assert policy.num_held == len(since)


@SETTINGS
@given(SNAPSHOTS)
def test_who_is_alone_is_encoded(snapshot: RoundSnapshot):
    alone = RoundSnapshot(
        0,
        0,
        snapshot.itl_seconds,
        tuple(one for one in snapshot.prompts if one.encode_seconds),
        snapshot.token_budget,
    )
    assert not alone.prompts or decisions(EncodeRounds(), alone, 0.0)[0] is RoundReason.NOBODY_DECODES


@SETTINGS
@given(st.lists(SNAPSHOTS, max_size=6))
def test_decisions_are_the_same_again(history: list[RoundSnapshot]):
    one, other = EncodeRounds(), EncodeRounds()
    for now, snapshot in enumerate(history):
        assert decisions(one, snapshot, float(now)) == decisions(other, snapshot, float(now))


@SETTINGS
@given(SNAPSHOTS)
def test_what_fits_leaves_every_promise_its_time(snapshot: RoundSnapshot):
    step = EncodeRounds().step(snapshot, 0.0)
    encoded = 0.0
    for one in snapshot.prompts:
        if one.encode_seconds:
            reason = step.encode(one.key, one.encode_seconds, one.prefill_seconds, one.deadline)
            encoded += one.encode_seconds * (reason is RoundReason.FITS)
    if encoded:
        took = snapshot.base_seconds + encoded + step.prompt_tokens * snapshot.token_seconds
        assert took <= snapshot.itl_seconds
    assert 0 <= step.prompt_tokens <= snapshot.token_budget


@SETTINGS
@given(SNAPSHOTS, st.sampled_from("abcdef"), SECONDS)
def test_asking_whether_it_is_held_changes_nothing(snapshot: RoundSnapshot, key: str, seconds: float):
    step = EncodeRounds().step(snapshot, 0.0)
    held = step.holds(key, seconds)
    assert (step.encode(key, seconds, 1.0, 9.0) in HOLDS) is held
