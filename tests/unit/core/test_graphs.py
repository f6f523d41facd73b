"""The core on stages that branch: forks, joins, deaths in one branch, and errors."""

from __future__ import annotations

import pytest

from tests.support.graphs import DIAMOND, FORK, Branching

pytestmark = pytest.mark.usefixtures("validated_core")

ONLY_OUTPUT = {"runtime": {"branch_errors": "output"}}
CREDITS = {"credits": {"enabled": True}}


def test_an_output_goes_to_all_successors_and_a_join_waits_for_all():
    one = Branching(DIAMOND)
    one.come("a")
    one.finish("a", 0)
    assert one.running() == [("a", 1), ("a", 2)]
    one.finish("a", 2)
    assert one.running() == [("a", 1)]
    one.finish("a", 1)
    assert one.running() == [("a", 3)]
    one.finish("a", 3)
    assert one.ended == {"a": "done"}
    assert set(one.starts.values()) == {1}


def test_stages_that_lead_to_no_asked_output_do_not_run():
    one = Branching(FORK)
    one.come("a", [2])
    one.finish("a", 0)
    assert one.running() == [("a", 2)]
    one.finish("a", 2)
    assert one.ended == {"a": "done"}


def test_identical_work_runs_once_for_requests_with_other_outputs():
    one = Branching(FORK)
    one.come("a", [1], key="k")
    one.come("b", [2], key="k")
    one.finish("a", 0)
    assert one.running() == [("a", 1), ("b", 2)]
    one.finish_all()
    assert one.ended == {"a": "done", "b": "done"}


def test_after_a_death_only_what_is_lost_runs_again():
    one = Branching(DIAMOND)
    one.come("a")
    for stage in (0, 1, 2):
        one.finish("a", stage)
    one.kill(3, 0, lambda sources: [2])
    one.revive()
    assert one.running() == [("a", 0)]
    one.finish_all()
    assert one.ended == {"a": "done"}
    assert one.starts == {("a", 0): 2, ("a", 1): 1, ("a", 2): 2, ("a", 3): 2}


def test_a_death_in_one_branch_does_not_disturb_the_other():
    one = Branching(FORK, replicas=2)
    one.come("a")
    one.finish("a", 0)
    one.kill(1, one.core.stages[1].running["a"].replica_id, lambda sources: sources)
    assert one.running() == [("a", 0), ("a", 2)]
    one.finish("a", 2)
    assert one.ended == {}
    one.finish_all()
    assert one.ended == {"a": "done"}
    assert one.outputs["a"] == {0: 2, 1: 1, 2: 1}


def test_a_request_that_dies_too_often_is_given_up():
    one = Branching(FORK, runtime={"recovery": {"max_redispatches": 1}})
    one.come("a")
    one.finish("a", 0)
    for _ in range(2):
        one.kill(1, 0, lambda sources: sources)
        one.revive()
        while one.running() and ("a", 1) not in one.running():
            one.finish(*next(each for each in one.running() if each[1] == 0))
    assert one.ended == {"a": "failed"}


@pytest.mark.parametrize(("options", "ended"), [({}, "failed"), (ONLY_OUTPUT, "partly")])
def test_an_error_fails_the_request_or_only_the_output(options, ended):
    one = Branching(FORK, **options)
    one.come("a")
    one.finish("a", 0)
    one.error("a", 1)
    assert one.running() == ([("a", 2)] if options else [])
    one.finish_all()
    assert one.ended == {"a": "done" if options else ended}
    assert one.outputs["a"] == ({0: 1, 2: 1} if options else {0: 1})


# ---- chunks

SPEECH = {0: (), 1: (0,), 2: (0,), 3: (1,)}  # 1 and 3 read chunks
READERS = {1, 3}


def test_stages_that_read_chunks_start_with_those_that_they_read():
    one = Branching(SPEECH, chunked=READERS)
    one.come("a")
    assert one.running() == [("a", 0), ("a", 1), ("a", 3)]
    one.finish("a", 0)
    assert one.running() == [("a", 1), ("a", 2), ("a", 3)]
    for stage in (1, 3, 2):
        one.finish("a", stage)
    assert one.ended == {"a": "done"}


def test_a_stage_that_reads_chunks_waits_until_all_that_it_reads_have_started():
    one = Branching({0: (), 1: (0,), 2: (0,), 3: (1, 2)}, chunked={2, 3})
    one.come("a")
    assert one.running() == [("a", 0), ("a", 2)]
    one.finish("a", 0)
    assert one.running() == [("a", 1), ("a", 2), ("a", 3)]


@pytest.mark.parametrize("dead", [1, 3])
def test_stages_that_exchange_chunks_run_again_together(dead):
    one = Branching(SPEECH, replicas=2, chunked=READERS)
    one.come("a")
    one.finish("a", 0)
    one.kill(dead, one.core.stages[dead].running["a"].replica_id)
    assert one.running() == [("a", 0), ("a", 1), ("a", 2), ("a", 3)]
    assert one.starts == {("a", 0): 2, ("a", 1): 2, ("a", 2): 1, ("a", 3): 2}


def test_a_stage_that_reads_no_chunks_runs_again_alone():
    one = Branching(SPEECH, replicas=2, chunked=READERS)
    one.come("a")
    one.finish("a", 0)
    one.kill(2, one.core.stages[2].running["a"].replica_id)
    assert one.starts == {("a", 0): 1, ("a", 1): 1, ("a", 2): 2, ("a", 3): 1}


def test_there_are_no_credits_where_stages_exchange_chunks():
    assert Branching(SPEECH, chunked=READERS, runtime=CREDITS).core.context.credits is None
    assert Branching(SPEECH, runtime=CREDITS).core.context.credits is not None


def test_equal_requests_share_all_stages_that_exchange_chunks_until_one_has_ended():
    one = Branching(SPEECH, chunked=READERS)
    for name in "ab":
        one.come(name, key="x")
    assert one.running() == [("a", 0), ("a", 1), ("a", 3)]
    one.finish("a", 1)
    one.come("c", key="x")
    leaders = {name: {one.core.stages[stage].leader_of(name) for stage in (0, 3)} for name in "bc"}
    assert leaders == {"b": {"a"}, "c": {"c"}}
    one.finish_all()
    assert one.ended == dict.fromkeys("abc", "done")
