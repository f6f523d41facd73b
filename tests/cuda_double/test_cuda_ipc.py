"""The transport from device to device between real processes, by the driver that serves on GPUs.

Its fault tests are those of the stand-in for a device, run here by CUDA IPC.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.arena import KIB
from tests.support.processes import Process
from tests.unit.connectors.cuda_ipc.test_faults import *  # noqa: F403 - the same tests, with processes of this folder
from tests.unit.connectors.cuda_ipc.test_faults import held

BIG = 20 * KIB
Start = Callable[..., Process]


def test_twenty_messages_arrive_and_all_memory_comes_back(start: Start) -> None:
    consumer, producer = start(), start()
    before = producer.allocated()
    for i in range(20):
        producer.put(f"{i}", BIG + i, i + 1)
        assert consumer.get(f"{i}") == (BIG + i, i + 1)
    assert held(producer) == (0, 0)
    assert producer.allocated() <= before + BIG + 512
    facts = producer.health()[2]
    assert (facts["device_tensors"], facts["device_fallbacks"]) == (20, {})


@pytest.mark.parametrize("fault", [False, True], ids=["as it is", "with the fault"])
def test_the_receiver_waits_for_the_senders_device(start: Start, fault: bool) -> None:
    consumer, producer = start(copy_out=True), start()
    if fault:
        consumer.forget_events()
    producer.hold_device(True)
    producer.put("k", BIG, 7)
    consumer.begin("get", "k")
    if fault:
        assert consumer.result() != (BIG, 7)
        producer.hold_device(False)
        return
    assert not consumer._orders.poll(0.3)
    producer.hold_device(False)
    assert consumer.result() == (BIG, 7)


@pytest.mark.parametrize("fault", [False, True], ids=["as it is", "with the fault"])
def test_a_block_goes_back_only_when_the_copy_of_it_has_ended(start: Start, fault: bool) -> None:
    consumer, producer = start(copy_out=True), start()
    if fault:
        consumer.forget_copies()
    producer.put("k", BIG, 7)
    consumer.hold_device(True)
    assert consumer.begin_get("k", "k")
    consumer.reap()
    assert held(producer) == ((0, 0) if fault else (1, BIG))
    producer.put("l", BIG, 9)  # gets the memory of the first, if that is free
    consumer.hold_device(False)
    try:
        found = consumer.look("k")
    except RuntimeError:  # the block is not mapped any more
        found = None
    assert (found == 7) != fault
    if not fault:
        consumer.reap()
        assert consumer.get("l") == (BIG, 9)
        assert held(producer) == (0, 0)


def test_cuda_in_a_forked_child_is_refused(start: Start) -> None:
    assert "forked subprocess" in start().cuda_in_a_fork()
