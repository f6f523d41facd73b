"""Draft tokens that are accepted save decode steps, and cost their verification."""

import pytest

from tests.support.sim_engine import PlainCosts, Run
from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.costs.drafted import DraftedCosts
from vllm_omni_sched.sim.costs.hardware import device
from vllm_omni_sched.sim.costs.models import model
from vllm_omni_sched.sim.costs.roofline import RooflineCosts
from vllm_omni_sched.sim.engine.speculation import Speculation
from vllm_omni_sched.sim.work import Request


def serve(speculation, requests, watched=False, **limits):
    return Run(PlainCosts(base=0.01), {"speculation": speculation, **limits}, watched).serve(requests)


def test_all_accepted_is_that_many_tokens_a_step():
    # the prompt makes the first token, and the other 100 come in 25 steps of 4
    run = serve(Speculation(3, 1.0), [Request(0, 0.0, 10, 101)])
    assert run.engine.decodes.steps == 25
    assert run.end(0) == pytest.approx(0.26)


def test_none_accepted_is_one_token_a_step():
    run = serve(Speculation(3, 0.0), [Request(0, 0.0, 10, 101)])
    assert run.engine.decodes.steps == 100


def test_the_mean_of_many_requests_is_that_of_the_model():
    speculation = Speculation(4, 0.7)
    tokens = 400
    steps = [speculation.steps(number, tokens) for number in range(300)]
    assert speculation.tokens_of_step == pytest.approx(1 + 0.7 + 0.49 + 0.343 + 0.2401)
    assert tokens / (sum(steps) / len(steps)) == pytest.approx(speculation.tokens_of_step, rel=0.02)
    assert steps == [speculation.steps(number, tokens) for number in range(300)]
    assert len(set(steps)) > 10


def test_more_draft_tokens_never_need_more_steps():
    for number in range(50):
        steps = [Speculation(drafts, 0.6).steps(number, 200) for drafts in range(1, 7)]
        assert steps == sorted(steps, reverse=True)


@pytest.mark.parametrize("numbers", [(0, 0.5), (2, -0.1), (2, 1.1)])
def test_numbers_out_of_range_are_refused(numbers):
    with pytest.raises(ConfigError, match=r"draft_tokens|acceptance"):
        Speculation(*numbers)


def test_the_kv_cache_grows_by_the_tokens_that_are_made():
    # 10 + 80 tokens each do not fit twice into 150
    requests = [Request(number, 0.0, 10, 81) for number in range(2)]
    run = serve(Speculation(3, 1.0), requests, kv_tokens=150)
    assert run.engine.preempted >= 1
    assert sorted(job.request.number for job, _ in run.ended) == [0, 1]
    assert run.engine.prompts.kv_tokens == 0


def test_draft_tokens_take_room_in_a_step():
    # of 8 tokens a step, the 4 of the first request leave 4 for the prompt of the other
    run = Run(PlainCosts(base=0.01), {"speculation": Speculation(3, 0.0), "max_num_batched_tokens": 8}).serve(
        [Request(0, 0.0, 1, 30), Request(1, 0.05, 16, 1)]
    )
    assert max(facts["prefill_tokens"] for _, _, facts in run.steps if facts["decodes"]) == 4


@pytest.mark.parametrize("acceptance", [0.0, 0.6, 1.0])
def test_steps_that_are_computed_together_are_those_one_by_one(acceptance):
    requests = [Request(number, 0.21 * number, 30, 60 + number) for number in range(8)]
    limits = {"kv_tokens": 400, "max_num_seqs": 4}
    runs = [serve(Speculation(2, acceptance), requests, watched, **limits) for watched in (False, True)]
    ends = [[(job.request.number, pytest.approx(at)) for job, at in run.ended] for run in runs]
    assert ends[0] == ends[1]
    assert runs[0].engine.decodes.steps == runs[1].engine.decodes.steps


def test_verifying_costs_operations_and_no_further_reading():
    shape, kind = model("qwen2.5-vl-7b"), device("h100-80gb")
    one, five = RooflineCosts(shape, kind), RooflineCosts(shape, kind, queries=5)
    # few requests: the weights are read once, whatever is verified; many: it is all operations
    assert five.step_seconds(1, 1000, 0, 0.0) == pytest.approx(one.step_seconds(1, 1000, 0, 0.0), rel=1e-6)
    base = one.efficiency.step_seconds
    wide = five.step_seconds(2000, 2_000_000, 0, 0.0) - base
    assert wide == pytest.approx(5 * (one.operations_seconds(2000, 2_000_000, 0, 0.0)), rel=1e-6)
    assert five.step_seconds(0, 0, 4096, 8e6) == one.step_seconds(0, 0, 4096, 8e6)


@pytest.mark.parametrize("decodes", [1, 40, 300])
def test_drafting_is_a_part_of_a_step_and_the_line_is_that_of_steps(decodes):
    shape, kind = model("qwen2.5-vl-7b"), device("h100-80gb")
    alone = RooflineCosts(shape, kind)
    costs = DraftedCosts(RooflineCosts(shape, kind, queries=4), alone, 0.3)
    context = 500 * decodes
    without = DraftedCosts(RooflineCosts(shape, kind, queries=4), alone, 0.0)
    more = costs.step_seconds(decodes, context, 100, 1e4) - without.step_seconds(decodes, context, 100, 1e4)
    assert more == pytest.approx(0.3 * alone.step_seconds(decodes, context, 0, 0.0))
    assert costs.step_seconds(0, 0, 100, 1e4) == alone.step_seconds(0, 0, 100, 1e4)
    for one in (costs, without):
        fixed, slope, limit = one.decode_line(decodes, context)
        for tokens in {context, min(limit, 10 * context)}:
            assert one.step_seconds(decodes, tokens, 0, 0.0) == pytest.approx(fixed + slope * tokens)
