"""Encoding in rounds in the simulated engine, where an encode takes longer than the promised gap."""

from tests.support.sim_engine import PlainCosts, Run
from vllm_omni_sched.sim.work import Item, Request

COSTS = PlainCosts(base=0.01, prefill=1e-5, embed=0.004)  # 100 embeddings take 0.4 s
ON = {"encode_rounds": True, "interactive_ttft_ms": 20_000.0}


def requests(number: int, output_tokens: int = 50) -> list[Request]:
    items = [(Item("image", 100, content),) for content in range(number)]
    return [Request(i, 0.3 * i, 200, output_tokens, items[i]) for i in range(number)]


def test_nobody_who_decodes_is_held_up() -> None:
    ours = Run(COSTS, **ON).serve(requests(12))
    stock = Run(COSTS).serve(requests(12))
    held_up = [sum(job.largest_gap > 0.1 for job in run.jobs.values()) for run in (stock, ours)]
    assert held_up[0] > 6
    # before the first encode was timed, it is unknown what one takes
    assert held_up[1] <= 1
    assert len(ours.ended) == len(stock.ended) == 12
    assert ours.engine.encoding.encoded == 12


def test_several_are_encoded_in_one_round() -> None:
    run = Run(COSTS, **ON).serve(requests(12))
    reasons = run.core.metrics.encode_rounds
    assert reasons["nobody_decodes"] > 6
    assert reasons["held"] > reasons["nobody_decodes"]


def test_text_goes_before_a_held_picture() -> None:
    picture = (Item("image", 100, 1),)
    first = Request(0, 0.0, 200, 300, (Item("image", 100, 0),))
    run = Run(COSTS, **ON).serve([first, Request(1, 1.0, 200, 5, picture), Request(2, 1.1, 50, 5)])
    assert run.jobs[2].first < 1.2
    assert run.jobs[1].first > run.jobs[0].first + 299 * 0.01  # when the first one's answer is over
    assert run.jobs[0].largest_gap < 0.1


def test_a_held_one_is_encoded_after_max_wait_seconds() -> None:
    picture = (Item("image", 100, 1),)
    first = Request(0, 0.0, 200, 3000, (Item("image", 100, 0),))
    run = Run(COSTS, **ON, max_wait_seconds=5.0).serve([first, Request(1, 1.0, 200, 5, picture)])
    assert 6.0 < run.jobs[1].first < 7.0


def test_who_left_is_forgotten() -> None:
    run = Run(COSTS, **ON).serve(requests(8))
    assert run.core.rounds is not None
    assert run.core.rounds.policy.num_held == len(run.core.book) == 0
