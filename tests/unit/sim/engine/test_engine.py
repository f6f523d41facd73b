"""The simulated engine, step by step, against what one adds up by hand."""

import math
from random import Random

import numpy as np
import pytest

from tests.support.sim_engine import PlainCosts, Run
from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.kernel import Simulator
from vllm_omni_sched.sim.servers import SharedServer
from vllm_omni_sched.sim.work import Item, Job, Request


def picture(embeds: int = 100, content: int = 0) -> Item:
    return Item("image", embeds, content)


def test_one_request_has_its_first_token_after_its_prompt_and_one_more_with_each_step() -> None:
    run = Run(PlainCosts(base=0.01, prefill=0.001, decode=0.1, front=0.5, answer=0.25)).serve([Request(0, 1.0, 100, 4)])
    job, ended = run.ended[0]
    assert job.first == pytest.approx(1.0 + 0.5 + 0.11 + 0.25)
    assert ended == pytest.approx(job.first + 3 * 0.11)
    assert run.itl.count == 3
    assert job.largest_gap == pytest.approx(0.11)


def test_a_request_that_is_taken_back_can_come_again_under_its_number() -> None:
    run = Run(PlainCosts(base=0.01))
    for _ in range(2):
        run.engine.submit(job := Job(Request(0, 0.0, 10, 9), 0))
        run.sim.run(run.sim.now + 0.015)
        run.engine.abort(job)
        run.sim.run()
    assert run.ended == []
    run.engine.submit(Job(Request(0, 0.0, 10, 9), 0))
    run.sim.run()
    assert len(run.ended) == 1


def test_an_item_is_encoded_in_front_of_the_step_that_computes_it_and_its_gap_shows_it() -> None:
    costs = PlainCosts(base=0.01, embed=0.01)
    run = Run(costs).serve([Request(0, 0.0, 10, 200), Request(1, 0.5, 10, 2, (picture(),))])
    assert run.jobs[0].largest_gap == pytest.approx(1.01)  # 100 embeddings
    assert run.jobs[1].largest_gap == pytest.approx(0.01)
    assert run.engine.busy_seconds()["encode"] == pytest.approx(1.0)


def test_equal_content_is_encoded_once_while_it_is_in_the_cache() -> None:
    costs = PlainCosts(base=0.01, embed=0.001)
    run = Run(costs).serve([Request(i, float(i), 10, 2, (picture(content=7),)) for i in range(5)])
    assert (run.engine.encoding.encoded, run.engine.encoding.hits) == (1, 4)
    small = Run(costs, {"encoder_cache_embeds": 100})
    small.serve([Request(i, float(i), 10, 2, (picture(content=i % 2),)) for i in range(6)])
    assert small.engine.encoding.encoded == 6


def test_a_long_prompt_goes_in_chunks_and_others_decode_meanwhile() -> None:
    run = Run(PlainCosts(base=0.01), {"max_num_batched_tokens": 100})
    run.serve([Request(0, 0.0, 10, 10), Request(1, 0.005, 350, 1)])
    tokens = [facts["prefill_tokens"] for _, _, facts in run.steps]
    assert tokens[:6] == [10, 99, 99, 99, 53, 0]
    assert run.jobs[1].first == pytest.approx(0.05)


def test_a_chunk_ends_before_an_item_for_which_the_encoder_has_no_budget_left() -> None:
    limits = {"encoder_budget_embeds": 150, "encoder_cache_embeds": 1000, "max_num_batched_tokens": 1000}
    run = Run(PlainCosts(base=0.01), limits)
    run.serve([Request(0, 0.0, 50, 1, (picture(100, 1), picture(100, 2), picture(40, 3)))])
    assert [facts["prefill_tokens"] for _, _, facts in run.steps] == [100, 190]


@pytest.mark.parametrize("smaller", ["encoder_budget_embeds", "encoder_cache_embeds"])
def test_an_item_larger_than_budget_or_cache_is_refused_as_vllm_does(smaller: str) -> None:
    with pytest.raises(ConfigError, match="item of 400 embeddings, but the engine accepts at most 150"):
        Run(limits={smaller: 150}).serve([Request(7, 0.0, 50, 1, (picture(100), picture(400, 2)))])


def test_no_more_run_than_may() -> None:
    run = Run(PlainCosts(base=0.01), {"max_num_seqs": 2}).serve([Request(i, 0.0, 1, 11) for i in range(4)])
    assert max(facts["decodes"] for _, _, facts in run.steps) == 2
    assert [run.end(i) for i in range(4)] == pytest.approx([0.11, 0.11, 0.22, 0.22])


def test_where_kv_memory_ends_the_last_one_gives_way_and_all_tokens_are_made_once() -> None:
    run = Run(PlainCosts(base=0.01), {"kv_tokens": 60}).serve([Request(i, 0.0, 20, 30) for i in range(2)])
    assert run.engine.preempted == 1
    assert len(run.ended) == 2
    assert run.itl.count == 2 * 29
    assert run.jobs[1].largest_gap > 10 * run.jobs[0].largest_gap
    assert run.engine.prompts.kv_tokens == 0


def test_what_never_fits_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="request 3 needs 101 tokens of KV cache, but a replica has 100"):
        Run(limits={"kv_tokens": 100}).serve([Request(3, 0.0, 100, 1)])


def test_with_a_lane_decodes_go_on_while_a_picture_is_encoded() -> None:
    costs = PlainCosts(base=0.01, embed=0.01)
    requests = [Request(0, 0.0, 10, 200), Request(1, 0.5, 10, 2, (picture(),))]
    run = Run(costs, encode_ahead=True).serve(requests)
    assert run.jobs[0].largest_gap == pytest.approx(0.01)
    assert run.jobs[1].first == pytest.approx(1.5 + 0.01, abs=0.0101)
    assert run.lane_seconds == pytest.approx(1.0)
    assert run.engine.busy_seconds()["encode"] == 0.0


def test_steps_beside_the_lane_have_what_it_leaves() -> None:
    costs = PlainCosts(base=0.01, embed=0.01, left=0.5)
    requests = [Request(0, 0.0, 10, 400), Request(1, 0.5, 10, 2, (picture(),))]
    run = Run(costs, encode_ahead=True).serve(requests)
    beside = [seconds for start, seconds, _ in run.steps if 0.52 < start < 1.45]
    assert min(beside) == pytest.approx(0.02)
    assert run.steps[-1][1] == pytest.approx(0.01)


def test_a_picture_that_nobody_is_held_up_by_is_encoded_in_the_step() -> None:
    run = Run(PlainCosts(base=0.01, embed=0.001), encode_ahead=True).serve([Request(0, 0.0, 10, 2, (picture(),))])
    assert run.engine.busy_seconds()["encode"] == pytest.approx(0.1)
    assert run.lane_seconds == 0.0


def test_two_who_want_the_same_picture_wait_for_one_encode() -> None:
    costs = PlainCosts(base=0.01, embed=0.01)
    requests = [Request(0, 0.0, 10, 300), *(Request(i, 0.1 * i, 10, 2, (picture(content=9),)) for i in (1, 2, 3))]
    run = Run(costs, encode_ahead=True).serve(requests)
    assert run.lane_seconds == pytest.approx(1.0)
    assert len(run.ended) == 4


def test_the_class_of_a_request_decides_where_the_order_is_by_sla() -> None:
    requests = [Request(0, 0.0, 10, 50), Request(1, 0.1, 10, 5, sla="batch"), Request(2, 0.2, 10, 5)]
    by_arrival = Run(PlainCosts(base=0.01), {"max_num_seqs": 1}).serve(requests)
    by_sla = Run(PlainCosts(base=0.01), {"max_num_seqs": 1}, waiting_order="sla").serve(requests)
    assert by_arrival.end(1) < by_arrival.end(2)
    assert by_sla.end(2) < by_sla.end(1)


def test_prompts_beside_decodes_stay_within_what_the_control_allows() -> None:
    requests = [Request(0, 0.0, 10, 2000), *(Request(1 + i, 0.3 + 0.1 * i, 4000, 1) for i in range(20))]
    costs = PlainCosts(base=0.005, prefill=1e-4)
    limits = {"max_num_batched_tokens": 8192}
    free = Run(costs, limits).serve(requests)
    bound = Run(costs, limits, prefill_control="adaptive", control_target_ms=50).serve(requests)
    assert free.jobs[0].largest_gap > 0.4
    late = [seconds for start, seconds, _ in bound.steps if start > 1.0]
    assert max(late) < 0.1
    assert len(bound.ended) == 21


def test_who_is_killed_is_returned_once_and_nothing_of_it_comes_back() -> None:
    costs = PlainCosts(base=0.01, embed=0.01, front=0.05)
    run = Run(costs, {"max_num_seqs": 2}, encode_ahead=True)
    requests = [Request(0, 0.0, 10, 900), *(Request(i, 0.1 * i, 10, 20, (picture(content=i),)) for i in range(1, 8))]
    run.serve(requests, until=0.73)
    ended = {job.request.number for job, _ in run.ended}
    lost = {job.request.number for job in run.engine.kill()}
    assert ended | lost == set(range(8))
    assert not ended & lost
    assert run.engine.in_flight == 0
    before = len(run.ended)
    run.sim.run()
    assert len(run.ended) == before
    run.engine.submit(run.jobs[3])  # it serves again
    run.sim.run()
    assert run.ended[-1][0] is run.jobs[3]


def test_an_aborted_request_leaves_room_for_others() -> None:
    run = Run(PlainCosts(base=0.01), {"max_num_seqs": 1})
    run.serve([Request(0, 0.0, 10, 10**6), Request(1, 0.1, 10, 5)], until=1.0)
    run.engine.abort(run.jobs[0])
    run.engine.abort(run.jobs[0])
    run.sim.run()
    assert [job.request.number for job, _ in run.ended] == [1]
    assert run.engine.prompts.kv_tokens == 0


@pytest.mark.parametrize("watched", [True, False])  # with steps one by one, and computed together
@pytest.mark.parametrize("limits", [{"max_num_seqs": 2}, {"kv_tokens": 21_000}])
def test_a_waiting_request_enters_with_the_next_step_after_an_abort(watched: bool, limits: dict[str, int]) -> None:
    """The other running request decodes for longer than anybody waits, and nothing else happens in the engine."""
    run = Run(PlainCosts(base=0.01), limits, watched=watched)
    run.serve([Request(0, 0.0, 10_000, 9000), Request(1, 0.0, 10_000, 900), Request(2, 0.1, 2000, 5)], until=1.005)
    assert run.jobs[2].first == math.inf
    run.engine.abort(run.jobs[0])
    run.sim.run()
    assert run.jobs[2].first == pytest.approx(1.02)  # the step that runs ends at 1.01
    assert [job.request.number for job, _ in run.ended] == [2, 1]


def test_the_same_seed_gives_the_same_run_to_the_last_digit() -> None:
    def ends() -> list[tuple[int, float]]:
        random = np.random.default_rng(3)
        at = np.cumsum(random.exponential(0.05, 300))
        requests = [Request(i, float(at[i]), 50, 20, (picture(60, i % 40),)) for i in range(300)]
        costs = PlainCosts(base=0.004, decode=1e-4, prefill=1e-5, embed=1e-4, left=0.7)
        run = Run(costs, {"max_num_seqs": 16}, encode_ahead=True, waiting_order="sla").serve(requests)
        return [(job.request.number, when) for job, when in run.ended]

    first = ends()
    assert first == ends()
    assert len(first) == 300
    assert math.isfinite(sum(when for _, when in first))


def test_steps_in_proportion_to_requests_are_processor_sharing() -> None:
    """Against the exact server, which `test_closed_forms` holds against E[T] = E[S] / (1 - rho)."""
    random = np.random.default_rng(0)
    n, load, tokens, each = 1_500, 0.6, 100, 0.004
    at = np.cumsum(random.exponential(tokens * each / load, n))
    lengths = np.where(random.random(n) < 0.8, random.integers(40, 81, n), random.integers(200, 321, n))
    # the first token comes with a prompt that costs nothing
    requests = [Request(i, float(at[i]), 1, int(lengths[i]) + 1) for i in range(n)]
    run = Run(PlainCosts(decode=each), {"max_num_seqs": n, "max_num_batched_tokens": 10**6}, watched=False)
    run.serve(requests)
    sim, exact = Simulator(), dict[int, float]()
    server = SharedServer(
        sim, lambda job: exact.update({job.request.number: sim.now}), lambda job, _: lengths[job.request.number] * each,
        Random(0),
    )  # fmt: skip
    for request in requests:
        sim.at(request.arrival, server.submit, Job(request, 0))
    sim.run()
    ours = np.array([run.end(i) for i in range(n)]) - at
    theirs = np.array([exact[i] for i in range(n)]) - at
    assert ours.mean() == pytest.approx(theirs.mean(), rel=0.02)
    assert np.corrcoef(ours, theirs)[0, 1] > 0.999
