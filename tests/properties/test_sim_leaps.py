"""Steps that are computed together are those that come one by one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.sim_engine import PlainCosts, Run
from vllm_omni_sched.sim.work import Item, Request

# times that meet no end of a step, as no request has those of another: what happens first at one and the same time is
# not promised
times = st.integers(1, 4000).map(lambda ms: ms / 1000 + 1.7e-7)
requests = st.lists(
    st.tuples(times, st.integers(1, 300), st.integers(1, 120), st.sampled_from((0, 0, 0, 50))), min_size=1, max_size=12
)
looks = st.lists(st.tuples(times, st.sampled_from(("look", "abort", "kill"))), max_size=6)
OPTIONS = (
    {},
    {"waiting_order": "sla", "encode_ahead": True, "prefill_control": "adaptive"},
    {"batch_control": "aimd", "batch_min": 2},
)


def served(
    asked: list[tuple[float, int, int, int]], looked: list[tuple[float, str]], watched: bool, options: dict[str, object]
) -> Run:
    costs = PlainCosts(base=0.0101, decode=0.00013, prefill=0.00007, embed=0.0003, front=0.003, answer=0.0011)
    run = Run(costs, {"kv_tokens": 900, "max_num_seqs": 8, "max_num_batched_tokens": 128}, watched, **options)
    run.seen = []  # type: ignore[attr-defined]

    def look(what: str) -> None:
        if what == "abort" and run.jobs:
            run.engine.abort(run.jobs[min(run.jobs)])
        elif what == "kill":
            run.engine.kill()
        busy = run.engine.busy_seconds()  # does not need the steps that it has not computed yet
        run.engine.catch_up()
        run.seen.append((busy, run.engine.decodes.steps))  # type: ignore[attr-defined]

    for at, what in looked:
        run.sim.at(at, look, what)
    ordered = sorted(asked)
    return run.serve(
        Request(number, at + 3.1e-8 * (number + 1), text, output, (Item("image", embeds, number),) if embeds else ())
        for number, (at, text, output, embeds) in enumerate(ordered)
    )


@settings(max_examples=150, deadline=None)
@given(requests, looks, st.sampled_from(OPTIONS))
def test_whether_steps_are_computed_together_changes_nothing(
    asked: list[tuple[float, int, int, int]], looked: list[tuple[float, str]], options: dict[str, object]
) -> None:
    together, single = (served(asked, looked, watched, options) for watched in (False, True))
    assert [(job.request.number, at) for job, at in together.ended] == [
        (job.request.number, pytest.approx(at)) for job, at in single.ended
    ]
    for job, _ in together.ended:
        other = single.jobs[job.request.number]
        assert (job.first, job.largest_gap) == pytest.approx((other.first, other.largest_gap))
    assert together.itl.count == single.itl.count
    assert together.itl.total == pytest.approx(single.itl.total)
    assert together.engine.busy_seconds() == pytest.approx(single.engine.busy_seconds())
    assert together.engine.decodes.steps == single.engine.decodes.steps
    if not any(what == "kill" for _, what in looked):  # the end of a step that nobody saw the end of is an event, too
        assert together.sim.events == single.sim.events
    for (busy, steps), (busy_single, steps_single) in zip(together.seen, single.seen, strict=True):  # type: ignore[attr-defined]
        assert (busy, steps) == (pytest.approx(busy_single), steps_single)


def test_steps_of_which_nobody_asks_are_one_event_of_the_heap() -> None:
    run = Run(PlainCosts(base=0.01), watched=False).serve([Request(0, 0.0, 10, 101)])
    assert run.engine.decodes.steps == 100
    assert run.sim._number < 10  # asked for: of 100 steps
    assert run.sim.events > 100
