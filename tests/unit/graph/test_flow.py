"""The rules of `RequestFlow`, one after the other."""

from __future__ import annotations

from vllm_omni_sched.graph.flow import FlowPlan, RequestFlow
from vllm_omni_sched.graph.stages import Stage, StageGraph, StageKind

DIAMOND = {0: (), 1: (0,), 2: (0,), 3: (1, 2)}
FORK = {0: (), 1: (0,), 2: (0,), 3: (1,)}


def graph(sources, outputs):
    return StageGraph.of(
        Stage(stage_id, f"s{stage_id}", StageKind.AR, reads, final_output=stage_id in outputs)
        for stage_id, reads in sources.items()
    )


def flow(sources, *outputs, consumes=True):
    return RequestFlow(FlowPlan.of(graph(sources, {*outputs, max(sources)}), outputs), consumes)


def run(one, *stages):
    """What starts after each stage."""
    return [one.finished(stage) for stage in stages]


def test_only_needed_stages_are_in_the_plan():
    whole = graph(FORK, {0, 2, 3})
    assert FlowPlan.of(whole, [2]).stages == (0, 2)
    assert FlowPlan.of(whole, [3]).stages == (0, 1, 3)
    assert FlowPlan.of(whole, [0]).successors == {0: ()}
    assert FlowPlan.of(whole, [3, 2, 3]).outputs == (3, 2)


def test_fork_and_join():
    one = flow(DIAMOND, 3)
    assert one.begin() == (0,)
    assert run(one, 0, 2, 1, 3) == [(1, 2), (), (3,), ()]
    assert one.is_over


def test_it_is_over_with_the_last_output():
    one = flow(FORK, 0, 2, 3)
    one.begin()
    over = []
    for stage in (0, 2, 1, 3):
        one.finished(stage)
        over.append(one.is_over)
    assert over == [False, False, False, True]


def test_a_branch_that_lost_its_input_does_not_disturb_the_other():
    one = flow(FORK, 2, 3)
    one.begin()
    assert one.send(0) == (1, 2)
    one.finished(0)
    assert one.again(1, lost=[0]) == ((0, 1), (0,))
    assert one.send(0) == (1,)
    assert run(one, 2, 0, 1, 3) == [(), (1,), (3,), ()]


def test_with_its_inputs_an_interrupted_stage_starts_alone():
    one = flow(DIAMOND, 3)
    one.begin()
    run(one, 0, 1, 2)
    assert one.again(3) == ((3,), (3,))


def test_only_what_is_lost_is_made_again():
    one = flow(DIAMOND, 3)
    one.begin()
    run(one, 0, 1, 2)
    assert one.again(3, lost=[2]) == ((0, 2, 3), (0,))  # stage 1's output is still there
    assert one.send(0) == (2,)
    assert run(one, 0, 2) == [(2,), (3,)]


def test_where_outputs_are_held_sources_of_sources_do_not_run_again():
    one = flow(DIAMOND, 3, consumes=False)
    one.begin()
    run(one, 0, 1, 2)
    assert one.again(3, lost=[2]) == ((2, 3), (2,))


def test_a_failure_takes_along_what_waits_for_it():
    one = flow(FORK, 0, 2, 3)
    one.begin()
    one.finished(0)
    assert one.failed(1) == ((3,), (1, 3))
    assert not one.is_over
    one.finished(2)
    assert one.is_over
    assert (one.complete, one.dropped) == ({0, 2}, {3})


def test_a_failure_before_a_join_stops_the_other_branch():
    one = flow(DIAMOND, 3)
    one.begin()
    one.finished(0)
    assert one.failed(2) == ((3,), (1, 2, 3))
    assert one.is_over
    assert one.finished(1) == ()


def test_a_branch_with_an_output_of_its_own_goes_on():
    one = flow(DIAMOND, 1, 3)
    one.begin()
    one.finished(0)
    assert one.failed(2) == ((3,), (2, 3))
    one.finished(1)
    assert one.is_over
