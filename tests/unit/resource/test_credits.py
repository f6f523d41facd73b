"""Back-pressure credits: the rules, on graphs small enough to see."""

import pytest

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.resource.pipeline.credits import Credits

LINE = {"thinker": ["talker"], "talker": ["vocoder"], "vocoder": []}
ONES = dict.fromkeys(LINE, 1)


def line(**capacities):
    return Credits(LINE, {**ONES, **capacities})


def frees(credits):
    return [credits.free(stage) for stage in credits.order]


def test_a_stage_starts_only_what_its_successor_has_credit_for():
    credits = line(thinker=2, vocoder=2)
    assert credits.take("thinker", "a")
    assert frees(credits) == [1, 0, 2]
    assert not credits.take("thinker", "b")
    credits.hand_over("a", "thinker", "talker")
    credits.give_back("a", "thinker")
    assert not credits.take("thinker", "b")  # queued there now
    assert credits.take("talker", "a")
    assert frees(credits) == [2, 0, 1]
    credits.give_back("a", "talker")
    assert credits.take("thinker", "b")
    credits.hand_over("b", "thinker", "talker")
    assert credits.take("talker", "b")
    credits.give_back("b", "talker")
    assert frees(credits) == [1, 1, 0]
    assert not credits.take("thinker", "c")
    credits.hand_over("a", "talker", "vocoder")
    assert credits.take("vocoder", "a")  # a sink waits for nobody
    credits.give_back("a")
    assert frees(credits) == [1, 1, 1]
    assert credits.take("thinker", "c")


def test_one_that_is_on_its_way_may_have_to_wait_for_its_next_stage():
    credits = line(thinker=2, talker=2)
    for name in "ab":
        assert credits.take("thinker", name)
        credits.hand_over(name, "thinker", "talker")
    assert credits.take("talker", "a")
    assert credits.needed("talker", "b") == ("vocoder",)
    assert not credits.take("talker", "b")
    credits.give_back("a")
    assert credits.take("talker", "b")


def test_nobody_enters_while_a_stage_of_the_path_is_full():
    credits = Credits(LINE, {"thinker": 3, "talker": 3, "vocoder": 1})
    assert credits.take("thinker", "a")
    credits.hand_over("a", "thinker", "talker")
    assert credits.take("talker", "a")
    assert credits.needed("thinker", "b") == ("thinker", "talker", "vocoder")
    assert not credits.take("thinker", "b")
    assert credits.take("thinker", "c", path=["thinker", "talker"])  # text only
    credits.give_back("a")
    assert credits.take("thinker", "b")
    assert credits.free("vocoder") == 1  # looked at, not taken


def test_a_stage_left_out_is_given_back_beforehand():
    credits = line()
    assert credits.take("thinker", "a")
    for stage in ("talker", "vocoder"):
        credits.give_back("a", stage)
        assert frees(credits) == [0, 1, 1]
    credits.hand_over("a", "thinker", "talker")  # too late: nobody has room for it any more
    credits.give_back("a", "thinker")
    assert frees(credits) == [1, 1, 1]


def test_where_branches_meet_again_no_two_hold_what_the_other_waits_for():
    """Without rule 4, x would hold c and wait for t, and y would hold t, by its short branch, and wait for c."""
    graph = {"s": ["a", "b"], "a": ["c"], "b": ["t"], "c": ["t"]}
    credits = Credits(graph, {"s": 2, "a": 2, "b": 2, "c": 1, "t": 1})
    for name in "xy":
        assert credits.take("s", name)
        credits.hand_over(name, "s", "a")
        credits.hand_over(name, "s", "b")
        credits.give_back(name, "s")
    assert credits.take("a", "x")
    assert "c" in credits.needed("b", "y")
    assert not credits.take("b", "y")
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
    credits.give_back("a")
    assert frees(credits) == [1, 1, 1]


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


def test_a_request_that_follows_needs_no_credit_and_its_branches_take_theirs():
    credits = Credits({"s": ["a", "b"], "a": [], "b": []}, {"s": 1, "a": 1, "b": 1})
    assert credits.take("s", "x")
    credits.skip("s", "y", ["s", "a", "b"])
    assert [credits.free(stage) for stage in "sab"] == [0, 0, 0]
    assert not credits.take("b", "y")
    credits.give_back("x")
    assert credits.take("b", "y")
    assert credits.take("a", "y")
    assert [credits.free(stage) for stage in "sab"] == [1, 0, 0]
    credits.validate()
