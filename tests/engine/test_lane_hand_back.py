"""The worker half of encode-ahead and its real lane: what becomes of items when the process dies, and the CPUs used."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.descriptors import nothing_left_open
from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.engine.ahead import worker as ahead_worker
from vllm_omni_sched.engine.ahead.messages import AheadOrders, AheadReport
from vllm_omni_sched.engine.ahead.worker import AheadWorker, Item
from vllm_omni_sched.lanes import InlineLane
from vllm_omni_sched.lanes.processors import Processors
from vllm_omni_sched.testing import make_data

pytestmark = pytest.mark.newest

ALONE, FORK_SERVER_TOO, EVERYWHERE, LAST = 13, 14, 15, 16


class Encoder(torch.nn.Module):
    """An encoder that the values of an item can harm."""

    def __init__(self) -> None:
        super().__init__()
        self._owner = os.getpid()
        self.weight = 2.0

    def embed_multimodal(self, values: torch.Tensor, **_: Any) -> list[torch.Tensor]:
        value = int(values.flatten()[0])
        in_lane = os.getpid() != self._owner
        if value == FORK_SERVER_TOO and in_lane:
            os.kill(os.getppid(), signal.SIGKILL)
        if value in (ALONE, FORK_SERVER_TOO, EVERYWHERE) and in_lane:
            os.kill(os.getpid(), signal.SIGKILL)
        if value == EVERYWHERE:
            raise ArithmeticError("no encoder can do this")
        return [values.float().reshape(-1, 1) * self.weight]


@pytest.fixture
def worker() -> Iterator[AheadWorker]:
    with nothing_left_open():
        worker = AheadWorker(OmniSchedConfig(encode_ahead=True, encode_lane_cpus="shared"))
        worker.start(Encoder(), torch.device("cpu"))
        yield worker
        worker.close()


def encode(worker: AheadWorker, values: list[int]) -> AheadReport:
    """All that the worker reports of items with these values; ``values`` are also their tickets."""
    orders = AheadOrders(submit=[(f"item-{v}", v, "image", make_data(v, num_values=3), 3) for v in values])
    worker.carry_out(orders, {})
    told = AheadReport()
    while len(told.ready) + len(told.failed) < len(values):
        worker.wait(20.0)
        told = told.aggregate(worker.report() or AheadReport())
        worker.carry_out(AheadOrders(known=(*told.ready, *told.failed)), {})
    return told


@pytest.mark.parametrize("value", [ALONE, FORK_SERVER_TOO], ids=["process", "process and fork server"])
def test_it_is_encoded_in_the_step(worker: AheadWorker, value: int) -> None:
    told = encode(worker, [1, value, 2, 3])
    assert not told.failed
    cache: dict[str, torch.Tensor] = {}
    worker.carry_out(AheadOrders(load={f"item-{v}": f"item-{v}" for v in (1, value, 2, 3)}), cache)
    assert {key: made.flatten().tolist() for key, made in cache.items()} == {
        f"item-{v}": [2.0 * v] * 3 for v in (1, value, 2, 3)
    }
    assert told.restarts == 1
    assert isinstance(worker._lane, InlineLane) is (value == FORK_SERVER_TOO)
    assert set(encode(worker, [4, 5]).ready) == {4, 5}


def test_no_step_is_held_back_while_the_scheduler_does_not_know_of_an_encode_that_has_ended(
    worker: AheadWorker,
) -> None:
    encode(worker, [0])
    waited: list[float] = []
    worker.lane.wait = waited.append  # type: ignore[assignment, method-assign]
    order = ("item-1", 1, "image", make_data(1, num_values=3), 3)
    worker.carry_out(AheadOrders(submit=[order], rest_seconds=0.02), {})
    while not (worker.report() or AheadReport()).ready:
        worker.wait(0.03)
    assert waited[0] == 0.02
    waited.clear()
    worker._at_lane["2"] = Item(2, "item-2", "image", None, 3)  # under way
    worker.carry_out(AheadOrders(rest_seconds=0.02), {})
    worker.wait(0.03)
    assert waited == []
    worker.carry_out(AheadOrders(rest_seconds=0.02, known=(1,)), {})
    worker.wait(0.03)
    assert waited == [0.02, 0.03]


def load(worker: AheadWorker, *values: int, **orders: Any) -> dict[str, list[float]]:
    cache: dict[str, torch.Tensor] = {}
    worker.carry_out(AheadOrders(load={f"item-{v}": f"item-{v}" for v in values}, **orders), cache)
    return {name: made.flatten().tolist() for name, made in cache.items()}


def test_after_orders_of_another_epoch_nothing_that_was_encoded_is_left_and_the_lane_has_the_present_weights(
    worker: AheadWorker,
) -> None:
    encode(worker, [1])
    worker._encode._model.weight = 5.0
    order = ("item-2", 2, "image", make_data(2, num_values=3), 3)
    worker.carry_out(AheadOrders(submit=[order]), {})
    worker.forget()
    assert worker.report() is None or not worker._made  # as before a call that may change weights
    worker.carry_out(AheadOrders(epoch=1), {})
    assert (worker._made, worker._tickets, worker.encoding) == ({}, {}, False)
    orders = AheadOrders(submit=[("item-3", 3, "image", make_data(3, num_values=3), 3)], epoch=1)
    worker.carry_out(orders, {})
    told = AheadReport()
    while not told.ready:
        worker.wait(20.0)
        told = worker.report() or told
    assert (told.epoch, set(told.ready)) == (1, {3})
    assert load(worker, 3, epoch=1) == {"item-3": [15.0] * 3}
    assert worker.lane.restarts == 0


class Placed(torch.nn.Module):
    """An encoder that tells its number of threads and its processors; with two layers, so that they can change."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Identity(), torch.nn.Identity()])

    def embed_multimodal(self, values: torch.Tensor, **_: Any) -> list[torch.Tensor]:
        for layer in self.layers:
            layer(values)
        here = [torch.get_num_threads(), *sorted(os.sched_getaffinity(0))]
        return [torch.tensor(here, dtype=torch.float).reshape(-1, 1)]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_an_item_that_is_alone_is_encoded_on_all_processors_while_the_llm_computes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm, free = sorted(os.sched_getaffinity(0))[:2]
    lanes = Processors(frozenset({free}), 1, own=True), Processors(frozenset({llm}), 2, own=False)
    monkeypatch.setattr(ahead_worker, "processors_here", lambda *_, **__: lanes)
    with nothing_left_open():
        worker = AheadWorker(OmniSchedConfig(encode_ahead=True))
        worker.start(Placed(), torch.device("cpu"))
        found = []
        for ticket, idle in enumerate((True, False, True)):
            cache: dict[str, torch.Tensor] = {}
            order = (f"item-{ticket}", ticket, "image", make_data(ticket, num_values=3), 3)
            worker.carry_out(AheadOrders(submit=[order], llm_idle=idle), cache)
            while (report := worker.report() or AheadReport()) and not report.ready:
                worker.wait(20.0)
            worker.carry_out(AheadOrders(load={f"item-{ticket}": f"item-{ticket}"}), cache)
            found.append(cache[f"item-{ticket}"].flatten().tolist())
        worker.close()
    assert found == [[2, llm, free], [1, free], [2, llm, free]]
