"""What every simulated server keeps to: each job is done once, or was taken back, or lost."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.sim_engine import PlainCosts
from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.sim.costs.base import Source, SourceKind
from vllm_omni_sched.sim.engine.limits import EngineLimits, make_core
from vllm_omni_sched.sim.engine.server import EngineServer
from vllm_omni_sched.sim.kernel import Simulator
from vllm_omni_sched.sim.measure import Histogram
from vllm_omni_sched.sim.servers import EncoderServer, QueueServer, SharedServer
from vllm_omni_sched.sim.video import VideoServer, stock_decoding
from vllm_omni_sched.sim.work import Clip, Item, Job, Request


class Decoding:
    source = Source(SourceKind.ASSUMED, "of this test")
    piece_seconds = 0.001

    def frames_seconds(self, clip, frames):
        return frames * 0.003


class Encoding:
    source = Source(SourceKind.ASSUMED, "of this test")

    def encode_seconds(self, modality, embeds, items=1, share=1.0):
        return 0.01 + embeds * 1e-4


def drawn(job, rng):
    return rng.expovariate(2.0)


def rng():
    return random.Random(7)


def engine(sim, done, **options):
    limits = EngineLimits(2500, max_num_seqs=3, max_num_batched_tokens=256)
    costs = PlainCosts(base=0.01, decode=0.002, prefill=1e-4, embed=1e-3, front=0.01, answer=0.003, left=0.5)
    return EngineServer(sim, costs, limits, make_core(OmniSchedConfig(**options), limits), done, Histogram())


SERVERS = {
    "queue": lambda sim, done: QueueServer(sim, done, 2, drawn, rng()),
    "queue of one": lambda sim, done: QueueServer(sim, done, 1, drawn, rng()),
    "shared": lambda sim, done: SharedServer(sim, done, drawn, rng()),
    "encoder": lambda sim, done: EncoderServer(sim, done, Encoding(), batch_items=3),
    "video": lambda sim, done: VideoServer(sim, done, Decoding(), decoders=3, threads=4),
    "engine": lambda sim, done: engine(sim, done),
    "engine with a lane": lambda sim, done: engine(sim, done, encode_ahead=True, waiting_order="sla"),
    "stock video": lambda sim, done: stock_decoding(sim, done, Decoding(), 3, rng(), loaders=2),
}
IN_ORDER = ["queue of one", "encoder"]


def job_of(number, rng):
    clip = Clip(rng.uniform(0.1, 4.0), 10.0, 640, 360, rng.choice([5, 30]), rng.randint(1, 16))
    items = [Item("video", 64, number, clip), Item("image", rng.randint(1, 900), number)]
    return Job(Request(number, float(number), 10, rng.randint(1, 30), tuple(rng.sample(items, rng.randint(0, 2)))), 0)


@pytest.mark.parametrize("make", SERVERS.values(), ids=SERVERS)
@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**32), dies=st.booleans())
def test_each_job_is_done_once_or_taken_back_or_lost(make, seed, dies):
    rng = random.Random(seed)
    sim = Simulator()
    came, done, taken_back, busy = [], [], [], []
    server = make(sim, done.append)

    def submit(job):
        came.append(job)
        server.submit(job)

    def abort(job):
        if job in came and job not in done:
            taken_back.append(job)
            server.abort(job)

    def look(_):
        assert server.in_flight == len(came) - len(done) - len(taken_back)
        busy.append(sum(server.busy_seconds().values()))

    for number in range(12):
        job, when = job_of(number, rng), rng.uniform(0, 3)
        sim.at(when, submit, job)
        if rng.random() < 0.3:
            sim.at(when + rng.choice([0.0, 0.1, 1.0]), abort, job)
    for _ in range(8):
        sim.at(rng.uniform(0, 6), look)
    sim.run(until=1.5 if dies else float("inf"))
    lost = server.kill()
    assert lost == [job for job in came if job not in done and job not in taken_back]
    assert dies or not lost
    assert server.in_flight == 0
    assert len(set(done)) == len(done)
    assert not set(done) & set(taken_back)
    assert all(job.first <= sim.now for job in done)
    busy.append(sum(server.busy_seconds().values()))
    assert all(after >= before - 1e-9 for before, after in pairwise(busy))


@pytest.mark.parametrize("make", SERVERS.values(), ids=SERVERS)
def test_nothing_is_done_after_death(make):
    sim, done = Simulator(), []
    server = make(sim, done.append)
    rng = random.Random(3)
    jobs = [job_of(number, rng) for number in range(6)]
    for job in jobs:
        server.submit(job)
    assert server.in_flight == 6
    assert not done  # never while it is submitted
    sim.run(until=0.02)
    lost = server.kill()
    assert lost == [job for job in jobs if job not in done]
    finished, busy = list(done), server.busy_seconds()
    sim.run()
    assert done == finished
    assert server.busy_seconds() == busy


@pytest.mark.parametrize("make", [SERVERS[name] for name in IN_ORDER], ids=IN_ORDER)
def test_first_come_first_served(make):
    sim, done = Simulator(), []
    server = make(sim, done.append)
    rng = random.Random(5)
    jobs = [Job(Request(n, 0.0, 1, 1, (Item("image", rng.randint(1, 900), n),)), 0) for n in range(9)]
    for job in jobs:
        server.submit(job)
    sim.run()
    assert done == jobs


@pytest.mark.parametrize("make", SERVERS.values(), ids=SERVERS)
def test_to_abort_what_is_not_here_changes_nothing(make):
    sim, done = Simulator(), []
    server = make(sim, done.append)
    job = job_of(0, random.Random(1))
    server.abort(job)
    server.submit(job)
    sim.run()
    server.abort(job)
    assert done == [job]
    assert server.in_flight == 0
