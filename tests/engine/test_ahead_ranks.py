"""Encode-ahead on the real scheduler with two workers, whose lanes finish items, and die, when the test says so."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.engine.harness.bench import EMBEDS, Bench
from vllm_omni_sched.config.errors import LaneDiedError, LaneError, LaneWorkError
from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.core.engine.lane_ranks import LaneRanks
from vllm_omni_sched.engine.ahead.messages import AheadReport
from vllm_omni_sched.engine.ahead.rank import RankWorker
from vllm_omni_sched.engine.ahead.warm_up import WARM_UP
from vllm_omni_sched.lanes import Done, Job, MemberLane

RANKS = 2


class ScriptedLane(MemberLane):
    """A lane of one rank without a process."""

    def __init__(self) -> None:
        self.dead = self.for_ever = self.llm_idle = False
        self.restarts = 0
        self.waiting: list[Job] = []
        self.ended: list[Done] = []
        self.joined: list[int] = [0]  # generations
        self.waits: list[float] = []

    def submit(self, job: Job) -> bool:
        if self.dead:
            raise LaneDiedError("the encoder process has ended")
        if job.key == WARM_UP.key:
            self.joined.append(job.payload.generation)
            return True
        if len(self.waiting) < 4:
            self.waiting.append(job)
            return True
        return False

    def poll(self) -> list[Done]:
        ended, self.ended = self.ended, []
        return ended

    def wait(self, timeout: float) -> bool:
        self.waits.append(timeout)
        return bool(self.ended)

    def set_share(self, share: float) -> None: ...

    def finish(self, error: str | None = None) -> None:
        if self.waiting and not self.dead:
            key = self.waiting.pop(0).key
            bad = None if error is None else LaneWorkError(error)
            self.ended.append(Done(key, None if bad else torch.ones(EMBEDS, 1), bad, 0.1))

    def die(self, *, for_ever: bool = False) -> None:
        self.dead, self.for_ever = True, for_ever
        self.ended += [Done(job.key, error=LaneDiedError("the encoder process was killed")) for job in self.waiting]
        self.waiting.clear()

    def replace(self) -> None:
        if self.for_ever:
            raise LaneError("the fork server has ended")
        self.dead = False
        self.restarts += 1
        self.waiting.clear()
        self.ended.clear()

    def close(self, timeout: float = 5.0) -> None: ...


class TwoWorkers(Bench):
    """The bench with two real worker halves in place of the one that only keeps books."""

    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        self.planner._ranks = LaneRanks(RANKS)
        self.planner.decisions._in_step = lambda *_: False  # all of it goes to the lanes
        self.again: list[str] = []  # contents that all workers encoded in a step, because of a lost lane
        self.ranks = [RankWorker(OmniSchedConfig(encode_ahead=True)) for _ in range(RANKS)]
        self.caches: list[dict[str, torch.Tensor]] = [{} for _ in range(RANKS)]
        for rank in self.ranks:
            rank._lane = ScriptedLane()
            rank._encode = lambda payload, pause: torch.ones(EMBEDS, 1)  # type: ignore[assignment]

    def lane_of(self, rank: int) -> Any:
        return self.ranks[rank]._lane

    def _as_worker(self, scheduled: Any) -> None:
        orders = scheduled.ec_connector_metadata
        self.host_report = AheadReport().host
        self.submitted += [mm_hash for mm_hash, *_ in orders.submit]
        if orders.ranks is not None:
            self.again += [mm_hash for mm_hash, _ in orders.ranks.again]
        for rank, cache in zip(self.ranks, self.caches, strict=True):
            for mm_hash in scheduled.free_encoder_mm_hashes:
                cache.pop(mm_hash, None)
            rank.carry_out(orders, cache)
            for request_id, ids in scheduled.scheduled_encoder_inputs.items():
                for i in ids:
                    cache[self.features[request_id][i].identifier] = torch.ones(EMBEDS, 1)
            for request_id, num_tokens in scheduled.num_scheduled_tokens.items():
                end = self.scheduler.requests[request_id].num_computed_tokens
                for feature in self.features[request_id]:
                    offset = feature.mm_position.offset
                    if offset < end and offset + EMBEDS > end - num_tokens:
                        assert feature.identifier in cache, "Encoder cache miss"
        self.in_step += [
            self.features[request_id][i].identifier
            for request_id, ids in scheduled.scheduled_encoder_inputs.items()
            for i in ids
        ]
        assert set(self.caches[0]) == set(self.caches[1])

    def _encode(self, count: int) -> AheadReport:
        report = AheadReport()
        for rank in self.ranks:
            if isinstance(rank._lane, ScriptedLane):
                for _ in range(count):
                    rank._lane.finish()
            report = report.aggregate(rank.report() or AheadReport())
        return report

    def finish(self, rank: int, error: str | None = None) -> None:
        self.lane_of(rank).finish(error)

    def rest_until_all_left(self) -> None:
        for _ in range(300):
            if len(self.scheduler.requests) == 1:  # the one that decodes
                break
            self.step(finish=1)
        assert list(self.scheduler.requests) == ["text"]
        assert len(self.planner._ranks) == 0
        for rank in self.ranks:
            assert (rank._backlog, rank._at_lane, rank._tickets, rank._unsettled, rank._made) == ({}, {}, {}, {}, {})


@pytest.fixture
def bench() -> Iterator[TwoWorkers]:
    bench = TwoWorkers()
    bench.decode()
    yield bench
    bench.rest_until_all_left()


def test_an_item_is_ready_when_both_have_it(bench: TwoWorkers) -> None:
    bench.add("r", 20, [(4, "a")])
    bench.step()
    bench.finish(0)
    for _ in range(3):
        assert bench.step().num_scheduled_tokens == {"text": 1}
    bench.finish(1)
    bench.step()
    assert bench.step().num_scheduled_tokens == {"text": 1, "r": 20}
    assert (bench.in_step, bench.again) == ([], [])


@pytest.mark.parametrize("dies_at", ["before", "after one has it"])
def test_what_a_lost_lane_was_at_is_encoded_by_both_in_the_step(bench: TwoWorkers, dies_at: str) -> None:
    bench.add("r", 40, [(4, "a"), (20, "b")])
    bench.step()
    if dies_at != "before":
        bench.finish(0)
        bench.step()
    bench.lane_of(1).die()
    bench.step()  # reports the loss
    bench.step()  # all encode in it
    assert bench.again == ["a", "b"]
    assert [bench.lane_of(rank).joined for rank in range(RANKS)] == [[0, 1]] * RANKS
    assert bench.step().num_scheduled_tokens["r"] == 40
    assert bench.scheduler.omni.metrics.lane_restarts == 1
    bench.add("later", 20, [(4, "c")])
    bench.step(finish=1)
    bench.step()
    assert bench.submitted == ["a", "b", "c"]
    assert bench.again == ["a", "b"]


def test_a_loss_that_both_report_one_after_the_other_is_one_loss(bench: TwoWorkers) -> None:
    bench.add("r", 20, [(4, "a")])
    bench.step()
    bench.lane_of(1).die()
    bench.step()
    bench.lane_of(0).die()  # it could not go on without the other
    bench.step()
    bench.step()
    assert [bench.lane_of(rank).joined for rank in range(RANKS)] == [[0, 1]] * RANKS


def test_an_item_that_one_cannot_encode_fails_its_request_and_no_other(bench: TwoWorkers) -> None:
    bench.add("bad", 20, [(4, "poison")])
    bench.add("good", 20, [(4, "a")])
    bench.step()
    bench.finish(1, "poisoned")
    bench.finish(0)
    bench.step()
    bench.rest_until_all_left()
    assert bench.left["bad"] == ["error"]
    assert bench.left["good"] == ["length"]
    assert bench.scheduler.omni.metrics.ahead_failed == 1


@pytest.mark.parametrize("seed", range(4))
def test_all_leave_once_however_lanes_live_and_die(seed: int) -> None:
    chance = random.Random(seed)
    bench = TwoWorkers(async_scheduling=bool(seed % 2))
    encode = bench._encode

    def unevenly(count: int) -> AheadReport:
        for rank in range(RANKS):
            lane = bench.lane_of(rank)
            if isinstance(lane, ScriptedLane):
                for _ in range(chance.choice([0, 0, 1, 2])):
                    lane.finish()
                if chance.random() < 0.03:
                    lane.die()
        return encode(0)

    bench._encode = unevenly  # type: ignore[method-assign]
    bench.churn(chance, 60, lambda: chance.randrange(25))
    assert bench.again
    for _ in range(20):
        bench.step()
    for rank in bench.ranks:
        assert (rank._made, rank._unsettled) == ({}, {})
