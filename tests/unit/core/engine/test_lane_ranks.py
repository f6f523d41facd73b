"""When all of several workers have an encoding, and what follows the end of one of their lanes."""

import pytest

from vllm_omni_sched.core.engine.lane_ranks import MOST_LOST, AfterLoss, LaneRanks


def test_one_worker_has_what_it_reports():
    ranks = LaneRanks(1)
    assert ranks.encoded(1, 1, 0.5) == 0.5
    assert ranks.failed(2)
    assert len(ranks) == 0


def test_the_last_worker_decides_and_the_slowest_one_gives_the_time():
    ranks = LaneRanks(3)
    assert ranks.encoded(1, 1, 0.5) is None
    assert ranks.encoded(2, 2, 0.1) is None
    assert ranks.encoded(1, 2, 0.25) == 0.5
    assert ranks.encoded(2, 1, 0.2) == 0.2
    assert len(ranks) == 0


def test_an_encode_goes_on_until_all_have_it_or_one_has_failed():
    ranks = LaneRanks(2)
    assert not ranks.awaits(1)
    ranks.encoded(1, 1, 0.5)
    ranks.encoded(2, 1, 0.5)
    assert ranks.awaits(1)
    assert ranks.awaits(2)
    ranks.encoded(1, 1, 0.5)
    ranks.failed(2)
    assert not ranks.awaits(1)
    assert not ranks.awaits(2)


@pytest.mark.parametrize("first", ["failed", "encoded"])
def test_one_failure_is_enough_and_counts_once(first: str):
    ranks = LaneRanks(3)
    if first == "encoded":
        assert ranks.encoded(1, 1, 0.5) is None
    assert ranks.failed(1)
    assert not ranks.failed(1)
    if first == "failed":
        assert ranks.encoded(1, 1, 0.5) is None
    assert len(ranks) == 0


def test_a_lost_lane_takes_its_generation_with_it_once():
    ranks = LaneRanks(2)
    assert ranks.encoded(1, 1, 0.5) is None
    assert ranks.lost(0, final=False) is AfterLoss.RENEW
    assert (ranks.generation, len(ranks)) == (1, 0)
    assert ranks.lost(0, final=False) is AfterLoss.NOTHING  # the other worker's lane, which could not go on
    assert ranks.lost(0, final=True) is AfterLoss.NOTHING
    assert ranks.generation == 1


def test_a_lane_that_cannot_be_replaced_is_the_last_one():
    ranks = LaneRanks(2)
    assert ranks.lost(0, final=True) is AfterLoss.STOP
    assert (ranks.stopped, ranks.generation) == (True, 1)
    assert ranks.lost(1, final=False) is AfterLoss.NOTHING


def test_generations_that_encode_nothing_are_the_last_ones():
    ranks = LaneRanks(2)
    after = [ranks.lost(generation, final=False) for generation in range(MOST_LOST)]
    assert after == [AfterLoss.RENEW] * (MOST_LOST - 1) + [AfterLoss.STOP]


def test_what_was_encoded_in_a_step_does_not_speak_for_the_lanes():
    ranks = LaneRanks(2)
    for generation in range(MOST_LOST):
        after = ranks.lost(generation, final=False)
        ranks.encode_in_step([generation])
        assert ranks.encoded(generation, 2, 0.1) == 0.1
    assert after is AfterLoss.STOP


def test_generations_that_encode_something_are_not():
    ranks = LaneRanks(2)
    for generation in range(3 * MOST_LOST):
        assert ranks.encoded(generation, 2, 0.1) == 0.1
        assert ranks.lost(generation, final=False) is AfterLoss.RENEW
