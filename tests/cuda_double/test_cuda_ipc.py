"""The transport from device to device between real processes, by the driver that serves on GPUs.

Its fault tests are those of the stand-in for a device, run here by CUDA IPC.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.support.arena import KIB
from tests.support.processes import Process
from tests.unit.connectors.cuda_ipc.test_faults import *  # noqa: F403 - the same tests, with processes of this folder
from tests.unit.connectors.cuda_ipc.test_faults import held
from vllm_omni_sched.config.errors import DeviceLostError

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


@pytest.mark.parametrize("copies", [True, False], ids=["copies", "views"])
def test_a_message_with_tensors_of_two_devices_goes_from_side_streams_to_side_streams(
    start: Start, copies: bool
) -> None:
    consumer, producer = start(copy_out=copies), start()
    for i in range(10):
        producer.put_many(f"{i}", [i + 1, i + 101], BIG + i)
        assert consumer.get_many(f"{i}") == [(0, i + 1), (1, i + 101)]
    assert held(producer) == (0, 0)
    assert producer.health()[2]["device_fallbacks"] == {}


@pytest.mark.parametrize("copies", [True, False], ids=["copies", "views"])
def test_a_message_to_oneself_waits_for_its_own_device(start: Start, copies: bool) -> None:
    process = start(copy_out=copies)
    process.hold_device(True)
    process.put("k", BIG, 7)
    assert process.begin_get("k", "k")
    process.hold_device(False)
    assert process.look("k") == 7
    process.drop("k")
    process.reap()
    assert held(process) == (0, 0)


def test_a_view_that_is_dropped_is_given_back_after_the_work_that_reads_it(start: Start) -> None:
    consumer, producer = start(copy_out=False), start()
    producer.put("k", BIG, 7)
    assert consumer.begin_get("k", "k")
    assert consumer.look("k") == 7
    consumer.copy_and_drop("k")
    assert held(producer) == (0, 0)
    producer.put("l", BIG, 9)  # gets the memory of the first
    assert consumer.get("l") == (BIG, 9)
    assert consumer.look("copy of k") == 7
    assert consumer.mapped() <= 1


def test_a_sender_without_memory_for_the_copy_sends_through_the_host(start: Start) -> None:
    consumer, producer = start(), start()
    producer.set_memory_bound(2 << 20)  # torch takes 2 MiB for tensors of up to one
    producer.occupy(1000 * KIB)
    producer.put("k", 1000 * KIB, 7)
    assert producer.health()[2]["device_fallbacks"] == {"no_memory": 1}
    assert consumer.get("k") == (1000 * KIB, 7)
    assert held(producer) == (0, 0)


def test_a_receiver_without_memory_for_its_copy_gives_the_block_back(start: Start) -> None:
    consumer, producer = start(copy_out=True), start()
    consumer.set_memory_bound(2 << 20)
    producer.put("k", 3 << 20, 7)
    with pytest.raises(DeviceLostError, match="out of memory"):
        consumer.get("k")
    consumer.reap()
    assert held(producer) == (0, 0)
    consumer.set_memory_bound(64 << 20)
    producer.put("l", 3 << 20, 8)
    assert consumer.get("l") == (3 << 20, 8)


@pytest.mark.parametrize("copies", [True, False], ids=["copies", "views"])
@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_calls_gives_right_values_and_all_memory_back(start: Start, copies: bool, seed: int) -> None:
    """Two senders and two receivers; tensors are looked at, and dropped, when the device has long gone on."""
    rng = random.Random(seed)
    consumers, producers = [start(copy_out=copies) for _ in range(2)], [start() for _ in range(2)]
    waiting: dict[str, tuple[Process, int, int]] = {}  # sender, bytes, value
    received: list[tuple[Process, str, int]] = []
    for number in range(120):
        call = rng.choice(("put", "put", "get", "get", "look", "drop", "discard", "replace"))
        if call == "put":
            waiting[f"{number}"] = (rng.choice(producers), rng.randrange(1, BIG), rng.randrange(250))
            sender, nbytes, fill = waiting[f"{number}"]
            sender.put(f"{number}", nbytes, fill)
        elif call == "replace" and waiting:
            key = rng.choice(list(waiting))
            sender, _, fill = waiting[key]
            waiting[key] = (sender, rng.randrange(1, BIG), (fill + 1) % 250)
            sender.put(key, *waiting[key][1:])
        elif call == "get" and waiting:
            key = rng.choice(list(waiting))
            _, _, fill = waiting.pop(key)
            receiver = rng.choice(consumers)
            assert receiver.begin_get(f"{number}", key)
            received.append((receiver, f"{number}", fill))
        elif call == "discard" and waiting:
            key = rng.choice(list(waiting))
            waiting.pop(key)[0].discard(key)
        elif call in ("look", "drop") and received:
            receiver, name, fill = received[at := rng.randrange(len(received))]
            assert receiver.look(name) == fill
            if call == "drop":
                receiver.drop(name)
                del received[at]
    for receiver, name, fill in received:
        assert receiver.look(name) == fill
        receiver.drop(name)
    for process in (*consumers, *producers):
        process.reap()
    for key, (sender, _, _) in waiting.items():
        sender.discard(key)
    assert [held(producer) for producer in producers] == [(0, 0), (0, 0)]


def test_cuda_in_a_forked_child_is_refused(start: Start) -> None:
    assert "forked subprocess" in start().cuda_in_a_fork()
