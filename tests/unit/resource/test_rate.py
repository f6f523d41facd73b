"""What an encode or a copy costs, before and after it was timed."""

import pytest

from vllm_omni_sched.resource.rate import EncodeCost, Rate


def test_the_first_observation_replaces_the_guess_and_later_ones_move_it():
    rate = Rate(5.0, weight=0.25)
    assert rate.seconds(2) == 10.0
    rate.observe(10, 10.0)
    assert rate.per_unit == 1.0
    rate.observe(1, 5.0)
    assert rate.per_unit == 2.0
    rate.observe(0, 99.0)
    assert rate.per_unit == 2.0


def test_unmeasured_encodes_cost_in_proportion_to_their_embeddings():
    cost = EncodeCost(start=0.5)
    assert [cost.seconds("image", n) for n in (1, 2, 8)] == [0.5, 1.0, 4.0]


def test_a_modality_costs_what_was_measured_of_it_and_a_new_one_what_the_others_cost():
    cost = EncodeCost(start=0.5)
    cost.observe("image", 10, 20.0)
    assert (cost.seconds("image", 3), cost.seconds("audio", 3)) == (6.0, 6.0)
    cost.observe("audio", 10, 1.0)
    assert cost.seconds("audio", 10) == pytest.approx(1.0)
    assert cost.seconds("image", 3) == 6.0


def test_what_is_not_encoded_costs_nothing():
    cost = EncodeCost()
    cost.observe("image", 1, 1.0)
    assert cost.seconds("prompt_embeds", 100) == 0.0
