"""The prefix cache of a simulated engine: what is found, what stays, and what it saves."""

from dataclasses import replace

import pytest

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.sim.costs.hardware import device
from vllm_omni_sched.sim.costs.models import model
from vllm_omni_sched.sim.costs.roofline import RooflineCosts
from vllm_omni_sched.sim.engine.limits import EngineLimits, make_core
from vllm_omni_sched.sim.engine.server import EngineServer
from vllm_omni_sched.sim.kernel import Simulator
from vllm_omni_sched.sim.measure import Histogram
from vllm_omni_sched.sim.server import Job
from vllm_omni_sched.sim.work import Item, Request
from vllm_omni_sched.sim.workloads.importers import TraceFormat, import_trace
from vllm_omni_sched.sim.workloads.trace import FORMAT, VERSION, Exact, Header, read_trace, write_trace

COSTS = RooflineCosts(model("qwen2.5-vl-7b"), device("a100-80gb"))
LIMITS = EngineLimits(100_000)


def serve(requests, limits=LIMITS):
    """Serve the requests, and return the engine with TTFT by request."""
    sim, done = Simulator(), []
    engine = EngineServer(sim, COSTS, limits, make_core(OmniSchedConfig(), limits), done.append, Histogram())
    for request in requests:
        sim.at(request.arrival, engine.submit, Job(request, 0))
    sim.run()
    return engine, {job.request.number: job.first - job.request.arrival for job in done}


def asks(number, at, blocks, tokens=None, output=2, items=()):
    tokens = 1000 * len(blocks) if tokens is None else tokens
    return Request(number, at, tokens, output, items, blocks=tuple(blocks), block_tokens=1000)


def test_a_prompt_begins_behind_the_blocks_of_another():
    engine, ttft = serve([asks(0, 0.0, range(8)), asks(1, 10.0, [*range(6), 100, 101]), asks(2, 20.0, [50, *range(7)])])
    assert ttft[1] < ttft[0] / 2
    assert ttft[2] == pytest.approx(ttft[0])  # an equal block behind other ones has another id
    assert (engine.prompts.cache.found, engine.prompts.cache.asked) == (6000, 24_000)


def test_the_last_token_is_always_computed():
    engine, _ = serve([asks(0, 0.0, range(3)), asks(1, 10.0, range(3))])
    assert engine.prompts.cache.found == 2000


def test_a_partial_block_is_not_kept():
    engine, _ = serve([asks(0, 0.0, range(3), tokens=2500), asks(1, 10.0, range(3), tokens=2900)])
    assert engine.prompts.cache.found == 2000


def test_the_least_recently_used_blocks_go_first():
    small = replace(LIMITS, kv_tokens=10_000)
    engine, _ = serve(
        [asks(0, 0.0, range(4)), asks(1, 10.0, range(10, 14)), asks(2, 20.0, range(4)), asks(3, 30.0, range(20, 25)),
         asks(4, 40.0, range(4)), asks(5, 50.0, range(10, 14))], small)  # fmt: skip
    # when the fourth comes, the second's are the oldest: the last one finds nothing
    assert engine.prompts.cache.found == 3000 + 3000
    assert engine.prompts.kv_tokens == 0


def test_without_it_all_is_computed():
    requests = [asks(0, 0.0, range(8)), asks(1, 10.0, range(8))]
    engine, ttft = serve(requests, replace(LIMITS, prefix_caching=False))
    assert engine.prompts.cache is None
    assert ttft[1] == pytest.approx(ttft[0])


def test_items_in_the_prefix_are_not_encoded_again():
    items = (Item("image", 1500, 7),)
    requests = [asks(number, 10.0 * number, range(4), tokens=2500, items=items) for number in range(2)]
    engine, ttft = serve(requests)
    assert engine.encoding.encoded == 1
    assert engine.encoding.hits == 0
    assert ttft[1] < ttft[0] / 2
    # blocks that end within an item do not help: it is needed from its first token
    engine, _ = serve([replace(one, items=(Item("image", 3900, 7),), text_tokens=100) for one in requests])
    assert engine.prompts.cache.found == 0


def test_memory_is_whole_after_preemptions():
    small = replace(LIMITS, kv_tokens=6000)
    requests = [asks(number, 0.01 * number, [0, 1, 10 + number], tokens=2900, output=400) for number in range(6)]
    engine, ttft = serve(requests, small)
    assert engine.preempted > 0
    assert len(ttft) == 6
    assert engine.prompts.kv_tokens == 0
    assert not engine.prompts.cache._holders
    assert engine.prompts.cache._idle_tokens <= 6000


def test_a_request_that_is_aborted_releases_its_blocks():
    sim = Simulator()
    engine = EngineServer(sim, COSTS, LIMITS, make_core(OmniSchedConfig(), LIMITS), lambda job: None, Histogram())
    job = Job(asks(0, 0.0, range(4), output=1000), 0)
    sim.at(0.0, engine.submit, job)
    sim.at(2.0, engine.abort, job)
    sim.run()
    assert not engine.prompts.cache._holders
    assert engine.prompts.cache._idle_tokens == 4000


def test_blocks_come_from_a_trace_of_mooncake(tmp_path):
    theirs = tmp_path / "theirs.jsonl"
    theirs.write_text(
        '{"timestamp": 0, "input_length": 1200, "output_length": 3, "hash_ids": [4, 5, 6]}\n'
        '{"timestamp": 9000, "input_length": 1300, "output_length": 3, "hash_ids": [4, 5, 7]}\n'
    )
    found = import_trace(theirs, TraceFormat.MOONCAKE).trace
    assert found.header.block_tokens == 512
    assert [one.blocks for one in found.requests] == [(4, 5, 6), (4, 5, 7)]
    write_trace(tmp_path / "ours.jsonl", found.header, found.requests)
    assert read_trace(tmp_path / "ours.jsonl").requests == found.requests
    theirs.write_text('{"timestamp": 0, "input_length": 500, "output_length": 3, "hash_ids": [4, 5]}\n')
    with pytest.raises(
        ConfigError, match="line 1: hash_ids has 2 blocks of 512 tokens, more than the input_length of 500"
    ):
        import_trace(theirs, TraceFormat.MOONCAKE)


def test_blocks_need_their_size(tmp_path):
    write_trace(tmp_path / "trace.jsonl", Header(FORMAT, VERSION), [Exact(0.0, 10, 1, blocks=(1,))])
    with pytest.raises(ConfigError, match="line 2: it has 'blocks', but the header has no 'block_tokens'"):
        read_trace(tmp_path / "trace.jsonl")
