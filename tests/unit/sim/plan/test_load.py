"""Requests of a trace are divided between training and held-out time, and between replicas."""

import pytest

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.plan.load import Load
from vllm_omni_sched.sim.workloads.replay import TraceOptions
from vllm_omni_sched.sim.workloads.trace import FORMAT, VERSION, Exact, Header, Interval, Tokens, Trace

OPTIONS = TraceOptions(file="trace")


def exact(number=120, gap=1.0, **more):
    requests = tuple(Exact(gap * at, 100 + at, 10, **more) for at in range(number))
    return Trace(Header(FORMAT, VERSION, 1.0, "a test"), requests=requests)


def lengths(part):
    return [request.text_tokens for request in part.requests]


def test_halves_share_no_request_and_replicas_share_none():
    load = Load(exact(), OPTIONS)
    halves = [
        [tokens for seed in range(3) for tokens in lengths(load.part(3, seed, held_out))] for held_out in (False, True)
    ]
    assert not set(halves[0]) & set(halves[1])
    assert sorted(halves[0] + halves[1]) == list(range(100, 220))
    assert len(halves[0]) == len(set(halves[0]))


def test_blocks_follow_each_other():
    load = Load(exact(), OPTIONS)
    part = load.part(1, 0)
    times = [request.arrival for request in part.requests]
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] < part.seconds == pytest.approx(60, rel=0.02)
    assert lengths(part)[:10] == list(range(100, 110))
    assert lengths(part)[10] == 121 or lengths(part)[10] == 120  # the second tenth of seconds is held out
    assert sorted(set(part.blocks)) == [0, 2, 4, 6, 8, 10]


def test_replicas_get_requests_in_turn():
    load = Load(exact(), OPTIONS)
    whole, second = load.part(1, 0), load.part(4, 1)
    assert lengths(second) == lengths(whole)[1::4]
    assert load.part(4, 5) == second


def test_a_faster_load_has_the_same_requests():
    load = Load(exact(), OPTIONS)
    part, faster = load.part(2, 0), load.part(2, 0, faster=2.0)
    assert lengths(part) == lengths(faster)
    assert faster.seconds == part.seconds / 2
    assert faster.requests[-1].arrival == pytest.approx(part.requests[-1].arrival / 2)


def test_means_and_what_requests_have():
    load = Load(exact(), OPTIONS)
    assert load.prompt_tokens == pytest.approx(159.5)
    assert load.tokens == pytest.approx(164.5)
    assert (load.output_tokens, load.longest, load.items, load.blocks) == (10, 229, False, False)
    assert load.rate == pytest.approx(1.0, rel=0.02)
    assert Load(exact(items=(("image", 5),)), OPTIONS).items


def test_requests_of_intervals_are_drawn_anew_for_each_seed():
    tokens = Tokens(((100.0, 10), (1000.0, 10)))
    intervals = tuple(Interval(10.0 * at, 10.0, 20, 20, tokens, tokens) for at in range(12))
    load = Load(Trace(Header(FORMAT, VERSION, 10.0), intervals=intervals), OPTIONS)
    assert load.part(1, 0) == load.part(1, 0) != load.part(1, 1)


def test_a_trace_without_a_second_half_is_refused():
    with pytest.raises(ConfigError, match="too few requests to hold some of them out"):
        Load(exact(1), OPTIONS)
