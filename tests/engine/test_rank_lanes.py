"""The worker halves of two ranks and their lanes' real processes: what they encode together, and what ends together."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.descriptors import nothing_left_open
from tests.support.lanes import LONG
from vllm_omni_sched import compat
from vllm_omni_sched.clock import monotonic_seconds
from vllm_omni_sched.config.errors import ConfigError, NoLaneError
from vllm_omni_sched.config.load import load_config
from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.engine.ahead import rank as rank_module
from vllm_omni_sched.engine.ahead.messages import AheadOrders, AheadReport, LaneLoss, RankOrders
from vllm_omni_sched.engine.ahead.rank import RankWorker
from vllm_omni_sched.engine.ahead.tensor_parallel import Ranks
from vllm_omni_sched.testing import make_data

pytestmark = pytest.mark.newest

CPU = torch.device("cpu")
RANKS = 2
DIES, RAISES, ALL_RAISE, NOT_OFFERED = 13, 14, 15, 16


class SplitEncoder(torch.nn.Module):
    """An encoder of which each rank has a part, and that the values of an item can harm."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank, self._owner, self.weight = rank, os.getpid(), 1.0
        self.layers = torch.nn.ModuleList([torch.nn.Identity() for _ in range(3)])

    def embed_multimodal(self, values: torch.Tensor, **_: Any) -> list[torch.Tensor]:
        from vllm.distributed import tensor_model_parallel_all_gather, tensor_model_parallel_all_reduce

        value, in_lane = int(values.flatten()[0]), os.getpid() != self._owner
        hidden = values.float().reshape(-1, 1) * (self._rank + 1) * self.weight
        for layer in self.layers:
            hidden = tensor_model_parallel_all_reduce(layer(hidden))
            if in_lane and self._rank == 1 and value == DIES:
                os.kill(os.getpid(), signal.SIGKILL)
            if value == ALL_RAISE or (value == RAISES and self._rank == 1):
                raise ArithmeticError("no encoder can do this")
            if in_lane and value == NOT_OFFERED:
                compat.tensor_parallel_group().send_tensor_dict({})
        return [tensor_model_parallel_all_gather(hidden, dim=0)]


def encoded(value: int, num_values: int = 3) -> list[float]:
    """What the lanes make of it: 1 + 2 parts, then twice the sum of two equal ones, gathered from both."""
    return [value * 3.0 * 2 * 2] * (RANKS * num_values)


class InTheWorker(SimpleNamespace):
    """The tensor-parallel group of the worker itself; here both are in one process, and each takes the other's part."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return tensor * 3 / (self.rank_in_group + 1) if self.calls == 1 else tensor * 2

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        self.calls = 0
        return torch.cat([tensor, tensor], dim)


def worker_of(rank: int, monkeypatch: pytest.MonkeyPatch, secret: str, share: float) -> RankWorker:
    worker = RankWorker(OmniSchedConfig(encode_ahead=True, encode_lane_cpus="shared"))
    become(rank, monkeypatch)
    monkeypatch.setattr(rank_module, "ranks_here", lambda: Ranks(secret, rank, RANKS, frozenset()))
    worker.start(SplitEncoder(rank), CPU)
    worker.lane.set_share(share)
    return worker


def become(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    group = InTheWorker(world_size=RANKS, rank_in_group=rank, rank=rank, local_rank=rank, ranks=[0, 1], calls=0)
    monkeypatch.setattr("vllm.distributed.parallel_state._TP", group)


class Pair:
    """Two workers that get the same orders, and what they have reported."""

    def __init__(self, workers: list[RankWorker], monkeypatch: pytest.MonkeyPatch) -> None:
        self.workers, self._monkeypatch = workers, monkeypatch
        self.caches: list[dict[str, torch.Tensor]] = [{}, {}]
        self.told = [AheadReport(), AheadReport()]

    def carry_out(self, **orders: Any) -> None:
        for rank, (worker, cache) in enumerate(zip(self.workers, self.caches, strict=True)):
            become(rank, self._monkeypatch)
            worker.carry_out(AheadOrders(**orders), cache)

    def submit(self, *values: int, **orders: Any) -> None:
        """Order the encodes of items with these values, which are their tickets, too."""
        self.carry_out(submit=[(f"item-{v}", v, "image", make_data(v, num_values=3), 3) for v in values], **orders)

    def listen(self, *, ended: int = 0, lost: bool = False) -> None:
        """Wait until each worker has reported so many items, or the loss of its lane."""
        until = monotonic_seconds() + LONG
        while any(len(t.ready) + len(t.failed) < ended or (lost and t.loss is None) for t in self.told):
            assert monotonic_seconds() < until, self.told
            for rank, worker in enumerate(self.workers):
                worker.wait(0.02)
                self.told[rank] = self.told[rank].aggregate(worker.report() or AheadReport())

    def load(self, *values: int) -> list[dict[str, list[float]]]:
        self.carry_out(load={f"item-{v}": f"item-{v}" for v in values})
        return [{name: made.flatten().tolist() for name, made in cache.items()} for cache in self.caches]


@pytest.fixture(params=[1.0, 0.2], ids=["whole share", "small share"])
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    secret = f"{request.node.name}-{os.getpid()}"
    with nothing_left_open():
        workers = [worker_of(rank, monkeypatch, secret, request.param) for rank in range(RANKS)]
        yield Pair(workers, monkeypatch)
        for worker in workers:
            worker.close()


def test_both_have_the_whole_encoding(pair: Pair) -> None:
    pair.submit(1, 2, 3)
    pair.submit(4, 5, 6)
    pair.listen(ended=6)
    assert pair.load(*range(1, 7)) == [{f"item-{v}": encoded(v) for v in range(1, 7)}] * RANKS


def test_after_orders_of_another_epoch_both_encode_with_the_present_weights(pair: Pair) -> None:
    pair.submit(1)
    for worker in pair.workers:
        worker._encode._model.weight = 2.0
        worker.forget()
    pair.submit(2, epoch=1, ranks=RankOrders(generation=1))
    pair.told = [AheadReport(epoch=1), AheadReport(epoch=1)]
    pair.listen(ended=1)
    assert [set(told.ready) for told in pair.told] == [{2}, {2}]
    pair.carry_out(load={"item-2": "item-2"}, epoch=1)
    doubled = [2 * value for value in encoded(2)]
    assert [cache["item-2"].flatten().tolist() for cache in pair.caches] == [doubled] * RANKS


def test_when_one_lane_dies_both_say_so_and_both_go_on(pair: Pair) -> None:
    pair.submit(1)
    pair.listen(ended=1)
    pair.submit(DIES, 2)
    pair.listen(lost=True)
    assert [told.loss.generation for told in pair.told if told.loss] == [0, 0]
    assert "SIGKILL" in str(pair.told[1].loss)
    again = (f"item-{DIES}", 20), ("item-2", 21)
    pair.submit(3, ranks=RankOrders(generation=1, again=again))
    pair.listen(ended=4)
    assert [set(told.ready) for told in pair.told] == [{1, 20, 21, 3}] * RANKS
    assert [told.restarts for told in pair.told] == [1, 1]
    expected = {f"item-{v}": encoded(v) for v in (1, 2, 3, DIES)}
    assert pair.load(1, 2, 3, DIES) == [expected] * RANKS


def test_a_killed_idle_lane_is_noticed_with_the_next_item(pair: Pair) -> None:
    pair.submit(1)
    pair.listen(ended=1)
    os.kill(pair.workers[0].lane.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    pair.submit(2)
    pair.listen(lost=True)
    pair.carry_out(ranks=RankOrders(generation=1, again=(("item-2", 20),)))
    pair.submit(3)
    pair.listen(ended=3)
    assert pair.load(1, 2, 3) == [{f"item-{v}": encoded(v) for v in (1, 2, 3)}] * RANKS


@pytest.mark.parametrize("bad", [RAISES, ALL_RAISE], ids=["one", "all"])
def test_what_one_cannot_encode_fails_at_both_and_nothing_else_does(pair: Pair, bad: int) -> None:
    pair.submit(1, bad, 2)
    pair.listen(ended=3)
    assert [set(told.ready) for told in pair.told] == [{1, 2}] * RANKS
    assert [list(told.failed) for told in pair.told] == [[bad]] * RANKS
    assert all("no encoder can do this" in told.failed[bad][1] for told in pair.told)
    assert [told.loss for told in pair.told] == [None] * RANKS


def test_without_lanes_both_encode_in_the_step(pair: Pair) -> None:
    pair.submit(1)
    pair.carry_out(ranks=RankOrders(generation=1, stopped=True, again=(("item-1", 20),)))
    pair.submit(2)
    pair.listen(ended=2)
    assert [set(told.ready) for told in pair.told] == [{20, 2}] * RANKS
    assert pair.load(1, 2) == [{f"item-{v}": encoded(v) for v in (1, 2)}] * RANKS


def test_an_encoder_that_uses_what_lanes_do_not_have_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = f"warm-up-{os.getpid()}"
    workers = []
    for rank in range(RANKS):
        worker = RankWorker(OmniSchedConfig(encode_ahead=True, encode_lane_cpus="shared"))
        become(rank, monkeypatch)
        monkeypatch.setattr(rank_module, "ranks_here", lambda rank=rank: Ranks(secret, rank, RANKS, frozenset()))
        worker.start(SplitEncoder(rank), CPU, lambda: [{"values": torch.full((3,), NOT_OFFERED)}])
        workers.append(worker)
    pair = Pair(workers, monkeypatch)
    pair.listen(lost=True)
    assert all(told.loss and told.loss.final and "send_tensor_dict" in told.loss.reason for told in pair.told)
    for worker in workers:
        worker.close()


def test_weights_that_change_before_the_scheduler_hears_that_there_is_no_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    """The orders of the new weights begin another generation of lanes, which there cannot be either."""

    def none(*args: Any) -> None:
        raise NoLaneError("this encoder has no lane")

    monkeypatch.setattr(rank_module, "build_member_lane", none)
    monkeypatch.setattr(rank_module, "ranks_here", lambda: Ranks("none", 0, RANKS, frozenset()))
    become(0, monkeypatch)
    worker = RankWorker(load_config({"omni_sched": "chat"}))
    worker.start(SplitEncoder(0), CPU)
    worker.carry_out(AheadOrders(epoch=1, ranks=RankOrders(generation=1)), {})
    report = worker.report()
    assert report is not None
    assert report.loss == LaneLoss(1, "this encoder has no lane", final=True)
    worker.carry_out(AheadOrders(epoch=1, ranks=RankOrders(generation=2, stopped=True)), {})
    worker.close()


def test_an_encoder_that_keeps_the_group_of_the_worker_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = SplitEncoder(0)
    become(0, monkeypatch)
    encoder.layers[1].tp_group = compat.tensor_parallel_group()
    monkeypatch.setattr(rank_module, "ranks_here", lambda: Ranks("secret", 0, RANKS, frozenset()))
    with pytest.raises(ConfigError, match=r"Identity\.tp_group of its encoder is a process group of the worker"):
        RankWorker(OmniSchedConfig(encode_ahead=True)).start(encoder, CPU)
