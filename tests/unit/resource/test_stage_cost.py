"""Costs per stage: what they start from, what they learn, and what they are never."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni_sched.resource.pipeline.stage_cost import CostPrior, Features, StageCosts


def talk(rng):
    return Features(prompt_tokens=rng.randrange(10, 2000), output_tokens=rng.randrange(1, 400))


def seconds_of(features, factor=1.0):
    return factor * (0.02 + 2e-4 * features.prompt_tokens + 5e-3 * features.output_tokens)


def taught(costs, number, factor=1.0, seed=1, noise=0.1):
    rng = random.Random(seed)
    for _ in range(number):
        one = talk(rng)
        costs.observe("talker", one, seconds_of(one, factor) * max(0.0, rng.gauss(1, noise)))
    return costs


def mean_error(costs, factor=1.0):
    rng = random.Random(99)
    tries = [talk(rng) for _ in range(200)]
    return sum(abs(costs.estimate("talker", t) / seconds_of(t, factor) - 1) for t in tries) / len(tries)


def test_a_stage_never_timed_costs_what_the_prior_says():
    costs = StageCosts(CostPrior(per_request=1, per_prompt_token=2, per_item=0.5))
    assert costs.estimate("thinker", Features(prompt_tokens=3, items=2)) == pytest.approx(1 + 6 + 1)
    assert costs.estimate("thinker", Features(pixels=1e6, steps=10)) == pytest.approx(1 + 0.01 + 0.2)
    assert not costs.is_measured("thinker")


def test_it_learns_a_stage_and_leaves_the_others_alone():
    costs = taught(StageCosts(), 200)
    assert mean_error(costs) < 0.1
    assert costs.is_measured("talker")
    assert costs.estimate("other", Features()) == StageCosts().estimate("other", Features())


def test_the_seconds_of_encodes_are_learnt_with_the_items():
    costs, text = StageCosts(), Features(prompt_tokens=1000)
    picture = Features(prompt_tokens=1000, items=4, pixels=4e6)
    assert costs.encode_seconds("thinker", picture) is None
    for _ in range(200):
        costs.observe("thinker", text, 0.5)
    assert costs.encode_seconds("thinker", text) == 0.0
    assert costs.encode_seconds("thinker", picture) is None  # only the prior tells
    for number in range(200):
        costs.observe("thinker", text, 0.5)
        items = number % 5
        costs.observe("thinker", Features(prompt_tokens=1000, items=items, pixels=items * 1e6), 0.5 + 0.3 * items)
    assert costs.encode_seconds("thinker", picture) == pytest.approx(1.2, rel=0.05)
    assert costs.encode_seconds("thinker", text) == 0.0
    assert costs.encode_seconds("thinker", Features(audio_seconds=30.0)) is None  # not timed with audio
    assert costs.encode_seconds("talker", picture) is None


def test_it_follows_when_the_stage_becomes_slower():
    costs = taught(StageCosts(), 200)
    taught(costs, 200, factor=5, seed=2)
    assert mean_error(costs, factor=5) < 0.2


def test_what_is_not_in_the_observations_stays_as_the_prior_has_it():
    costs = taught(StageCosts(), 100)
    plain = costs.estimate("talker", Features(prompt_tokens=100))
    assert costs.estimate("talker", Features(prompt_tokens=100, items=3)) - plain == pytest.approx(0.06, rel=0.01)


def test_what_is_left_is_the_output_still_to_come():
    costs = taught(StageCosts(), 300, noise=0.0)
    asked = Features(prompt_tokens=1000, output_tokens=100)
    assert costs.remaining("talker", asked, 0) == costs.estimate("talker", asked)
    assert costs.remaining("talker", asked, 40) == pytest.approx(60 * 5e-3, rel=0.1)
    # longer than expected: a tenth of what it has made
    assert costs.remaining("talker", asked, 200) == pytest.approx(20 * 5e-3, rel=0.1)


numbers = st.floats(0, 1e9)
anything = st.builds(Features, numbers, numbers, numbers, numbers, numbers, st.floats(0, 1e3))


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(anything, st.floats(0, 1e9)), max_size=15), anything, numbers)
def test_estimates_stay_within_bounds_whatever_is_observed(observed, asked, done):
    costs = StageCosts(max_seconds=100)
    for features, seconds in observed:
        costs.observe("a", features, seconds)
    assert 0 <= costs.estimate("a", asked) <= 100
    assert 0 <= costs.remaining("a", asked, done) <= 100
    assert 0 <= (costs.encode_seconds("a", asked) or 0.0) <= costs.estimate("a", asked) * (1 + 1e-9)
