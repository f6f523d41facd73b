"""Back-pressure credits: the rules, on graphs small enough to see."""

import pytest

from vllm_omni_sched.errors import ConfigError
from vllm_omni_sched.resource.credits import Blocked, Credits, WaitReason

LINE = {"thinker": ["talker"], "talker": ["vocoder"], "vocoder": []}
ONES = dict.fromkeys(LINE, 1)


def line(**capacities):
    return Credits(LINE, {**ONES, **capacities}, whole_path=False)


def frees(credits):
    return [credits.free(stage) for stage in credits.order]


def test_a_stage_starts_only_what_its_successor_has_credit_for():
    credits = line(thinker=2)
    assert credits.take("thinker", "a")
    assert frees(credits) == [1, 0, 1]
    assert not credits.take("thinker", "b")
    assert credits.blocked("thinker", "b") == Blocked("talker", WaitReason.SUCCESSOR_FULL)
    credits.hand_over("a", "thinker", "talker")
    credits.give_back("a", "thinker")
    assert not credits.take("thinker", "b")  # queued there now
    assert credits.take("talker", "a")
    assert frees(credits) == [2, 0, 0]
    assert credits.give_back("a", "talker") == 1
    assert credits.take("thinker", "b")
    credits.hand_over("b", "thinker", "talker")
    assert credits.blocked("talker", "b") == Blocked("vocoder", WaitReason.SUCCESSOR_FULL)
    credits.hand_over("a", "talker", "vocoder")
    assert credits.take("vocoder", "a")  # a sink waits for nobody
    assert credits.give_back("a") == 1
    assert credits.take("talker", "b")


def test_its_own_stage_may_be_full():
    credits = line(talker=2, vocoder=2)
    assert credits.take("thinker", "a")
    assert credits.blocked("thinker", "b") == Blocked("thinker", WaitReason.STAGE_FULL)


def test_nobody_enters_while_a_stage_of_the_path_is_full():
    credits = Credits(LINE, {"thinker": 3, "talker": 3, "vocoder": 1})
    assert credits.take("thinker", "a")
    credits.hand_over("a", "thinker", "talker")
    assert credits.take("talker", "a")
    assert credits.blocked("thinker", "b") == Blocked("vocoder", WaitReason.PATH_FULL)
    assert credits.blocked("thinker", "b", path=["thinker", "talker"]) is None  # text only
    credits.give_back("a")
    assert credits.take("thinker", "b")
    assert credits.free("vocoder") == 1  # looked at, not taken


def test_amounts_in_bytes():
    credits = line(thinker=100, talker=100, vocoder=60)
    assert credits.blocked("thinker", "a", 61) == Blocked("vocoder", WaitReason.NEVER_FITS)
    assert credits.take("thinker", "a", 60)
    assert not credits.take("thinker", "b", 41)
    assert credits.take("thinker", "c", 40)
    assert credits.taken("talker") == 100
    assert credits.give_back("a") == 120


def test_to_repeat_changes_nothing():
    credits = line()
    assert [credits.take("thinker", "a"), credits.take("thinker", "a")] == [True, True]
    for _ in range(2):
        credits.hand_over("a", "thinker", "talker")
    assert [credits.give_back("a", "thinker"), credits.give_back("a", "thinker")] == [1, 0]
    assert credits.take("thinker", "a")  # it was there before
    assert [credits.give_back("a"), credits.give_back("a"), credits.give_back("never seen")] == [1, 0, 0]
    assert frees(credits) == [1, 1, 1]


def test_a_stage_left_out_is_given_back_beforehand():
    credits = line()
    assert credits.take("thinker", "a")
    assert credits.give_back("a", "talker") == 1
    assert credits.give_back("a", "vocoder") == 0
    credits.hand_over("a", "thinker", "talker")  # too late: nobody has room for it any more
    assert credits.give_back("a", "thinker") == 1
    assert frees(credits) == [1, 1, 1]


def test_where_branches_meet_again_no_two_hold_what_the_other_waits_for():
    """Without rule 4: x holds c and waits for t, y holds t, by its short branch, and waits for c."""
    graph = {"s": ["a", "b"], "a": ["c"], "b": ["t"], "c": ["t"]}
    credits = Credits(graph, {"s": 2, "a": 2, "b": 2, "c": 1, "t": 1}, whole_path=False)
    for name in "xy":
        assert credits.take("s", name)
        credits.hand_over(name, "s", "a")
        credits.hand_over(name, "s", "b")
        credits.give_back(name, "s")
    assert credits.take("a", "x")
    assert credits.blocked("b", "y") == Blocked("c", WaitReason.SUCCESSOR_FULL)
    credits.hand_over("x", "a", "c")
    assert credits.take("c", "x")


def test_a_request_may_enter_at_two_stages():
    credits = Credits({"ears": ["mind"], "eyes": ["mind"]}, {"ears": 1, "eyes": 1, "mind": 1})
    for first in ("ears", "eyes"):
        assert credits.take(first, "a", path=["ears", "eyes", "mind"])
    assert frees(credits) == [0, 0, 0]
    for first in ("ears", "eyes"):
        credits.hand_over("a", first, "mind")
    assert credits.take("mind", "a")
    assert credits.give_back("a") == 3


@pytest.mark.parametrize(
    ("graph", "capacities", "message"),
    [
        (
            {"a": ["b"], "b": ["c"], "c": ["a"]},
            {"a": 1, "b": 1, "c": 1},
            r"cycle: (\w -> ){3}\w",
        ),
        ({"a": ["b"]}, {"a": 1}, "without a capacity: b"),
        ({"a": []}, {"a": 1, "z": 1}, "not in the graph: z"),
        ({"a": []}, {"a": 0}, "below 1: a"),
    ],
)
def test_bad_graphs_are_refused_by_name(graph, capacities, message):
    with pytest.raises(ConfigError, match=message):
        Credits(graph, capacities)


def test_wrong_calls_are_refused():
    credits = line()
    with pytest.raises(ValueError, match="has not started"):
        credits.hand_over("a", "thinker", "talker")
    with pytest.raises(ValueError, match="amount must be 1"):
        credits.take("thinker", "a", 0)
    with pytest.raises(ValueError, match="handed over"):
        credits.take("talker", "a", path=LINE)
    with pytest.raises(ValueError, match="not on its path"):
        credits.take("thinker", "a", path=["talker"])
    assert credits.take("thinker", "a")
    with pytest.raises(ValueError, match="amount must stay 1"):
        credits.take("thinker", "a", 2)
    with pytest.raises(ValueError, match="handed over"):
        credits.take("talker", "a")
    with pytest.raises(ValueError, match="not a successor"):
        credits.hand_over("a", "thinker", "vocoder")
    for call in (credits.free, credits.taken, lambda stage: credits.take(stage, "b")):
        with pytest.raises(ValueError, match="unknown stage 'ear'"):
            call("ear")
