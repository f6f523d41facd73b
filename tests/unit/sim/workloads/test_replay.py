"""Recorded traces, played again."""

from itertools import islice, pairwise

import numpy as np
import pytest

from vllm_omni_sched.sim.workloads.base import requests
from vllm_omni_sched.sim.workloads.registry import build
from vllm_omni_sched.sim.workloads.replay import Replay, TraceOptions, spread_times, token_draws
from vllm_omni_sched.sim.workloads.trace import FORMAT, VERSION, Exact, Header, Interval, Tokens, Trace, write_trace

HEADER = Header(FORMAT, VERSION, 10.0, "a test")
SHORT, LONG = Tokens(((10, 4),), 30.0), Tokens(((100, 0), (200, 1), (500, 3)), 1000.0)
EXACT = [Exact(0.5, 7, 9, (("image", 576), ("video", 90)), "batch", 3), Exact(2.0, 5, 1)]


def replayed(*entries, seed=1, **options):
    kinds = (
        tuple(one for one in entries if isinstance(one, Interval)),
        tuple(one for one in entries if isinstance(one, Exact)),
    )
    return list(requests(Replay(Trace(HEADER, *kinds), TraceOptions(file="x", **options)), seed))


def interval(at=0.0, arrivals=4, **more):
    return Interval(at, 10.0, arrivals, **{"finished": 4, "prompt_tokens": LONG, "generation_tokens": SHORT, **more})


def test_requests_come_back_as_they_were():
    one, other = replayed(*EXACT)
    assert (one.arrival, one.text_tokens, one.output_tokens, one.sla, one.client) == (0.5, 7, 9, "batch", 3)
    assert [(item.modality, item.embeds) for item in one.items] == [("image", 576), ("video", 90)]
    assert (other.arrival, other.items) == (2.0, ())


def test_requests_come_again_after_a_mean_gap_and_closer_with_scale():
    assert [one.arrival for one in replayed(*EXACT, repeat=2)] == [0.5, 2.0, 3.5, 5.0]
    assert [one.arrival for one in replayed(*EXACT, repeat=2, scale=2.0)] == [0.25, 1.0, 1.75, 2.5]
    contents = [item.content for one in replayed(*EXACT, repeat=3) for item in one.items]
    assert len(set(contents)) == 6


def test_each_interval_has_its_arrivals_within_it():
    found = replayed(interval(arrivals=30), interval(10.0, 0), interval(20.0, 5))
    times = [one.arrival for one in found]
    assert len([at for at in times if at < 10]) == 30
    assert len([at for at in times if 20 <= at < 30]) == 5
    assert len(times) == 35
    assert all(a <= b for a, b in pairwise(times))


def test_scale_multiplies_arrivals_and_keeps_the_time():
    found = replayed(*(interval(10.0 * n, 3) for n in range(400)), scale=0.5)
    assert len(found) == pytest.approx(600, rel=0.05)
    assert 3980 < found[-1].arrival < 4000
    assert len(replayed(interval(arrivals=7), scale=3.0)) == 21


def test_a_rate_is_reached_by_scaling():
    trace = Trace(HEADER, (interval(arrivals=20),))
    assert Replay(trace, TraceOptions(file="x")).rate == 2.0
    assert Replay(trace, TraceOptions(file="x", rate=5.0)).rate == 5.0
    assert len(replayed(interval(arrivals=20), rate=5.0)) == 50


def test_it_repeats_so_often_or_without_an_end():
    assert len(replayed(interval(), repeat=3)) == 12
    endless = requests(Replay(Trace(HEADER, (interval(),)), TraceOptions(file="x", repeat=0)), 1)
    assert next(islice(endless, 999, None)).arrival == pytest.approx(2495, abs=5)


def test_tokens_are_drawn_from_the_histogram_with_its_mean():
    found = token_draws(LONG)(np.random.default_rng(1), 50_000)
    assert found.min() >= 101
    assert found.max() <= 500
    assert (found <= 200).mean() == pytest.approx(0.25, abs=0.01)
    assert found.mean() == pytest.approx(250, rel=0.02)


@pytest.mark.parametrize("mean", [170.0, 300.0, 420.0])
def test_the_mean_is_the_recorded_one_wherever_it_lies(mean):
    tokens = Tokens(((100, 0), (200, 1), (500, 3)), 4 * mean)
    lowest, highest = 101 * 0.25 + 201 * 0.75, 200 * 0.25 + 500 * 0.75
    found = token_draws(tokens)(np.random.default_rng(1), 50_000).mean()
    assert found == pytest.approx(min(max(mean, lowest), highest), rel=0.03)


def test_a_bucket_without_a_bound_ends_at_twice_its_begin():
    found = token_draws(Tokens(((1000, 0), (None, 5))))(np.random.default_rng(1), 10_000)
    assert found.min() == 1001
    assert 1990 <= found.max() <= 2000


def test_an_interval_in_which_nothing_finished_borrows_its_sizes():
    empty = {"finished": 0, "prompt_tokens": Tokens(), "generation_tokens": Tokens()}
    early = Tokens(((1000, 0), (1001, 1)))
    found = replayed(interval(**empty), interval(10.0, prompt_tokens=early), interval(20.0, **empty))
    assert {one.prompt_tokens for one in found} == {1001}
    assert max(one.output_tokens for one in found) <= 10


def test_without_any_sizes_all_are_one_token():
    found = replayed(Interval(0.0, 10.0, 5))
    assert [(one.prompt_tokens, one.output_tokens) for one in found] == [(1, 1)] * 5


def test_items_are_parts_of_prompts_and_have_the_recorded_mean():
    counts = {"finished": 500, "items": {"unknown": 1000, "audio": 250}}
    many = interval(arrivals=5000, prompt_tokens=Tokens(((4000, 0), (4100, 9))), **counts)
    found = replayed(many, item_embeds=50, item_modality="video")
    items = [item.modality for one in found for item in one.items]
    assert items.count("video") / 5000 == pytest.approx(2.0, rel=0.05)
    assert items.count("audio") / 5000 == pytest.approx(0.5, rel=0.08)
    assert {4000 < one.prompt_tokens <= 4100 for one in found} == {True}
    assert not any(one.items for one in replayed(many))


def test_items_have_no_more_room_than_the_prompt():
    few = interval(arrivals=300, finished=4, items={"unknown": 40}, prompt_tokens=Tokens(((120, 0), (130, 4))))
    found = replayed(few, item_embeds=50)
    assert {len(one.items) for one in found} == {2}
    assert {one.prompt_tokens - 100 == one.text_tokens for one in found} == {True}


def test_classes_have_their_parts():
    found = [one.sla for one in replayed(interval(arrivals=4000, classes={"batch": 3, "interactive": 1}))]
    assert found.count("batch") / 4000 == pytest.approx(0.75, abs=0.03)
    assert {one.sla for one in replayed(interval(), sla="gold")} == {"gold"}


@pytest.mark.parametrize("cv", [0.3, 1.0, 3.0])
def test_gaps_have_the_recorded_variation(cv):
    gaps = np.diff(spread_times(np.random.default_rng(1), 40_000, cv))
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.06)


def test_without_one_they_are_even_at_random():
    times = spread_times(np.random.default_rng(1), 40_000, None)
    assert np.quantile(times, [0.25, 0.5, 0.75]) == pytest.approx([0.25, 0.5, 0.75], abs=0.02)


def test_a_file_is_found_beside_the_scenario_and_may_be_scaled_in_a_mix(tmp_path):
    write_trace(tmp_path / "mine.jsonl", HEADER, [interval(arrivals=20)])
    whole = build({"kind": "trace", "file": "mine.jsonl"}, folder=tmp_path)
    assert len(list(requests(whole, 1))) == 20
    assert "a test" in whole.source
    part = build({"kind": "mix", "rate": 6.0, "parts": [{"kind": "trace", "file": "mine.jsonl"}]}, folder=tmp_path)
    assert len(list(requests(part, 1))) == 60


def test_a_seed_is_a_replay():
    assert replayed(interval(), seed=3) == replayed(interval(), seed=3)
    assert replayed(interval(), seed=3) != replayed(interval(), seed=4)
