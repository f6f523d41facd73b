"""With prefill and decode engines every request leaves once, no token comes before its KV cache, and none is kept."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.sim_engine import PlainCosts
from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.sim.costs.base import Source, SourceKind
from vllm_omni_sched.sim.costs.hardware import Link
from vllm_omni_sched.sim.engine.limits import EngineLimits, make_core
from vllm_omni_sched.sim.engine.speculation import Speculation
from vllm_omni_sched.sim.engine.transfer import PrefillDecode
from vllm_omni_sched.sim.kernel import Simulator
from vllm_omni_sched.sim.measure import Histogram
from vllm_omni_sched.sim.server import Job
from vllm_omni_sched.sim.work import Request

SOURCE = Source(SourceKind.ASSUMED, "a test")
TOKEN_BYTES = 100.0


class Cluster:
    """Prefill and decode engines, whose transfers are noted."""

    def __init__(
        self,
        number: tuple[int, int] = (1, 1),
        speed: float = 1e5,
        costs: PlainCosts | None = None,
        prefill: EngineLimits | None = None,
        decode: EngineLimits | None = None,
        links: int = 1,
    ) -> None:
        self.sim, self.itl = Simulator(), Histogram()
        self.ended: list[int] = []
        self.came: dict[int, float] = {}
        costs = costs or PlainCosts(base=0.01)
        self.engines = PrefillDecode(
            self.sim,
            (costs, prefill or EngineLimits(10**6), number[0]),
            (costs, decode or EngineLimits(10**6), number[1]),
            lambda limits, _: make_core(OmniSchedConfig(), limits, history=1000),
            TOKEN_BYTES,
            Link("a link", speed, 0.5, SOURCE, SOURCE),
            links,
            self._end,
            self.itl,
        )
        self.jobs: dict[int, Job] = {}
        fetched = self.engines._fetched

        def note(job: Job) -> None:
            self.came[job.request.number] = self.sim.now
            fetched(job)

        self.engines._fetched = note  # type: ignore[method-assign]

    def _end(self, job: Job) -> None:
        self.ended.append(job.request.number)

    def serve(self, asked: list[Request]) -> Cluster:
        for request in asked:
            job = self.jobs[request.number] = Job(request, 0)
            self.sim.at(request.arrival, self.engines.submit, job)
        self.sim.run()
        return self

    def kept(self) -> list[tuple[int, int, int]]:
        """Return (tokens in use, pinned tokens, requests) of each engine."""
        every = (*self.engines.prefills, *self.engines.decodes)
        return [(one.prompts.kv_tokens, one.prompts.pinned, one.in_flight) for one in every]


def test_times_that_one_can_add_up() -> None:
    # a step of 10 ms; 100 tokens of 100 bytes at 100 kB/s, and half a second: 0.6 s; then a step for each token
    run = Cluster().serve([Request(0, 1.0, 100, 3)])
    assert run.came[0] == pytest.approx(1.01 + 0.6)
    assert run.jobs[0].first == pytest.approx(run.came[0] + 0.01)
    assert run.itl.count == 2
    assert run.engines.sent_bytes == 100 * TOKEN_BYTES
    assert run.kept() == [(0, 0, 0)] * 2


def test_transfers_of_an_engine_follow_each_other_and_more_links_are_faster() -> None:
    pair = [Request(0, 0.0, 100, 1), Request(1, 0.0, 100, 1)]
    one, two = Cluster().serve(pair), Cluster(links=2).serve(pair)
    assert one.came == pytest.approx({0: 0.61, 1: 0.71})
    assert two.came == pytest.approx({0: 0.56, 1: 0.61})
    apart = Cluster((2, 2)).serve(pair)
    assert apart.came == pytest.approx({0: 0.61, 1: 0.61})


def test_a_prefill_engine_holds_blocks_until_they_are_read() -> None:
    # room for one prompt: the second one is computed when the first one has been read
    run = Cluster(prefill=EngineLimits(150)).serve([Request(0, 0.0, 100, 1), Request(1, 0.0, 100, 1)])
    assert run.came == pytest.approx({0: 0.61, 1: 0.61 + 0.01 + 0.6})


def test_a_decode_engine_reserves_room_before_it_reads() -> None:
    run = Cluster(decode=EngineLimits(150)).serve([Request(0, 0.0, 100, 20), Request(1, 0.0, 100, 20)])
    assert run.came[1] > run.came[0] + 20 * 0.01  # the first one had ended
    assert sorted(run.ended) == [0, 1]


def test_blocks_in_the_prefix_cache_are_not_sent_again() -> None:
    asked = [Request(at, 10.0 * at, 100, 2, blocks=(1, 2, 3, 4, 10 + at), block_tokens=20) for at in range(2)]
    run = Cluster().serve(asked)
    assert run.engines.sent_bytes == (100 + 20) * TOKEN_BYTES
    assert run.kept() == [(0, 0, 0)] * 2


@pytest.mark.parametrize("after", [0.005, 0.3, 0.615])
def test_a_client_that_gives_up_frees_both_sides(after: float) -> None:
    # while its prompt is computed, while its KV cache is sent, and before its first token
    run = Cluster()
    run.sim.at(after, lambda _: run.engines.abort(run.jobs[0]))
    run.serve([Request(0, 0.0, 100, 50)])
    assert run.ended == []
    assert run.kept() == [(0, 0, 0)] * 2
    assert not run.engines.prefills[0].held


def test_a_client_that_gives_up_while_it_waits_to_be_sent_frees_the_prefill_engine() -> None:
    run = Cluster(decode=EngineLimits(150))
    run.sim.at(0.05, lambda _: run.engines.abort(run.jobs[1]))
    run.serve([Request(0, 0.0, 100, 20), Request(1, 0.0, 100, 20)])
    assert run.ended == [0]
    assert 1 not in run.came
    assert run.kept() == [(0, 0, 0)] * 2


requests = st.lists(
    st.tuples(
        st.integers(0, 3000), st.integers(1, 150), st.integers(1, 60), st.sampled_from((0, 0, 40)), st.booleans()
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=200, deadline=None)
@given(
    requests,
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.sampled_from((1e4, 1e5, 1e8)),
    st.sampled_from((None, Speculation(3, 0.6))),
    st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 11)), max_size=6),
)
def test_every_request_leaves_once_and_all_memory_is_free_again(
    asked: list[tuple[int, int, int, int, bool]],
    number: tuple[int, int],
    speed: float,
    speculation: Speculation | None,
    given_up: list[tuple[int, int]],
) -> None:
    tight = EngineLimits(400, max_num_seqs=4, max_num_batched_tokens=64)
    run = Cluster(
        number,
        speed,
        PlainCosts(base=0.0101, prefill=0.00007, front=0.003, answer=0.0011),
        tight,
        EngineLimits(400, max_num_seqs=4, max_num_batched_tokens=64, speculation=speculation),
    )
    arrivals = [
        Request(at, ms / 1000, text, output, blocks=tuple(range(shared // 20)), block_tokens=20 if shared else 0)
        for at, (ms, text, output, shared, _) in enumerate(sorted(asked))
        if shared <= text or not shared
    ]
    arrivals = [one for one in arrivals if len(one.blocks) * 20 <= one.text_tokens]
    gone: set[int] = set()

    def give_up(which: int) -> None:
        job = run.jobs.get(which)
        if job is not None and job.request.arrival <= run.sim.now and which not in run.ended:
            gone.add(which)
            run.engines.abort(job)

    for ms, which in given_up:
        run.sim.at(ms / 1000 + 1.3e-7, give_up, which)
    run.serve(arrivals)
    assert sorted([*run.ended, *gone]) == [one.number for one in arrivals]
    assert run.kept() == [(0, 0, 0)] * sum(number)
    assert not any(one.held for one in run.engines.prefills)
    for which in run.ended:
        assert run.jobs[which].first > run.came[which] > run.jobs[which].request.arrival
