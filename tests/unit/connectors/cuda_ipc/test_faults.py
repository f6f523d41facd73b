"""What becomes of device tensors when processes are killed, close or fork: real ones, at exact points."""

from __future__ import annotations

import os

import pytest

from tests.support.arena import EDGE, KIB
from tests.support.arena_faults import ARENA, Start
from tests.support.processes import Process
from vllm_omni_sched.config.errors import DeviceLostError
from vllm_omni_sched.connectors.arena import ArenaOptions

CUDA_IPC = "vllm_omni_sched.connectors.cuda_ipc"
BIG = 20 * KIB


@pytest.fixture(params=[True, False], ids=["copies", "views"])
def copies(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def held(process: Process) -> tuple[int, int]:
    """Return the number of messages in flight, and the device memory that they hold."""
    process.reap()
    facts = process.health()[2]
    assert process.blocks() == (facts["device_held"], facts["device_held"])
    return facts["in_flight"], facts["device_held_bytes"]


def test_a_tensor_goes_from_device_to_device(start: Start, copies: bool) -> None:
    consumer, producer = start(copy_out=copies), start()
    assert producer.put("k", BIG, 7) > BIG
    assert held(producer) == (1, BIG)
    assert consumer.get("k", hold=True) == (BIG, 7)
    assert held(producer) == ((0, 0) if copies else (1, BIG))
    assert consumer.look("k") == 7
    consumer.drop("k")
    assert held(producer) == (0, 0)
    facts = producer.health()[2]
    assert (facts["device_tensors"], facts["device_bytes"], facts["device_fallbacks"]) == (1, BIG, {})
    facts = consumer.health()[2]
    assert (facts["device_opened"], facts["device_opened_bytes"]) == (1, BIG)


def test_it_is_got_once(start: Start) -> None:
    consumers, producer = [start(), start()], start()
    producer.put("k", BIG, 7)
    assert [consumer.get("k") for consumer in (*consumers, *consumers)].count((BIG, 7)) == 1
    assert held(producer) == (0, 0)


@pytest.mark.parametrize(
    ("where", "after"),
    [
        (f"{ARENA}.index:Index.claim", True),
        (f"{CUDA_IPC}.cuda:CudaShare.open", False),
        (f"{CUDA_IPC}.cuda:CudaShare.open", True),
        ("tests.support.host_device:HostDriver.map", True),
        (f"{ARENA}.index:Index.consume", False),
    ],
)
def test_a_receiver_killed_in_get_gives_the_tensor_back(start: Start, copies: bool, where: str, after: bool) -> None:
    consumer, producer = start(copy_out=copies), start()
    producer.put("k", BIG, 9)
    consumer.die_at(where, after)
    consumer.dies("get", "k")
    assert held(producer) == (1, BIG)
    again = start(copy_out=copies)
    assert again.get("k") == (BIG, 9)
    assert again.get("k") is None
    assert held(producer) == (0, 0)


def test_a_receiver_killed_while_it_looks_at_a_tensor_gives_it_back(start: Start) -> None:
    consumer, producer = start(copy_out=False), start()
    for i in range(5):
        producer.put(f"{i}", BIG, i)
        assert consumer.get(f"{i}", hold=True) == (BIG, i)
    assert held(producer) == (5, 5 * BIG)
    consumer.kill()
    assert held(producer) == (5, 5 * BIG)
    again = start(copy_out=False)
    assert [again.get(f"{i}") for i in range(5)] == [(BIG, i) for i in range(5)]
    assert held(producer) == (0, 0)


@pytest.mark.parametrize("what", ["discarded", "replaced"])
def test_what_was_taken_back_while_a_receiver_had_it_ends_with_the_receiver(start: Start, what: str) -> None:
    consumer, producer = start(copy_out=False), start()
    producer.put("k", BIG, 1)
    consumer.get("k", hold=True)
    if what == "discarded":
        assert producer.discard("k") == 0
    else:
        producer.put("k", 2 * BIG, 2)
    assert consumer.look("k") == 1
    consumer.kill()
    assert held(producer) == ((0, 0) if what == "discarded" else (1, 2 * BIG))
    again = start()
    assert again.get("k") == (None if what == "discarded" else (2 * BIG, 2))
    assert held(producer) == (0, 0)


def test_a_sender_killed_before_its_message_is_shown_has_put_nothing(start: Start) -> None:
    consumer, producer = start(), start()
    producer.die_at(f"{ARENA}.index:Index.publish")
    producer.dies("put", "k", BIG, 7)
    assert consumer.get("k") is None
    assert start().put("k", BIG, 8) > BIG
    assert consumer.get("k") == (BIG, 8)


def test_a_sender_killed_after_put_takes_its_tensors_along_and_the_receiver_is_told(start: Start) -> None:
    consumer, producer = start(), start()
    for i in range(3):
        producer.put(f"{i}", BIG, i)
    producer.kill()
    for i in range(3):
        with pytest.raises(DeviceLostError, match="has ended; the tensor is lost"):
            consumer.get(f"{i}")
        assert consumer.get(f"{i}") is None
    assert consumer.health()[2]["device_lost"] == 3
    again = start()
    again.put("0", BIG, 5)
    assert consumer.get("0") == (BIG, 5)


def test_a_sender_killed_while_its_tensor_is_got(start: Start) -> None:
    consumer, producer = start(), start()
    producer.put("k", BIG, 7)
    consumer.die_at("tests.support.host_device:HostDriver.map", False, 19)  # SIGSTOP
    consumer.stops("get", "k")
    producer.kill()
    with pytest.raises(DeviceLostError, match="ended while it was received"):
        consumer.goes_on()


def test_what_a_receiver_has_copied_outlives_the_sender(start: Start) -> None:
    consumer, producer = start(copy_out=True), start()
    producer.put("k", BIG, 7)
    consumer.get("k", hold=True)
    producer.kill()
    assert consumer.look("k") == 7


def test_a_sender_that_closes_leaves_what_nobody_has_got_in_host_memory(start: Start, root: str) -> None:
    consumer, producer = start(copy_out=False), start()
    for i in range(3):
        producer.put(f"{i}", BIG, i)
    consumer.get("0", hold=True)
    producer.close()
    assert consumer.look("0") == 0  # as long as its process lives
    producer.kill()
    assert [consumer.get(f"{i}") for i in (1, 2)] == [(BIG, 1), (BIG, 2)]
    assert consumer.get("0") is None
    assert consumer.health()[2]["device_opened"] == 1


def test_a_receiver_that_closes_keeps_its_views_and_gives_them_back(start: Start) -> None:
    consumer, producer = start(copy_out=False), start()
    producer.put("k", BIG, 4)
    consumer.get("k", hold=True)
    consumer.close()
    assert held(producer) == (1, BIG)
    assert consumer.look("k") == 4
    consumer.drop("k")
    assert held(producer) == (0, 0)


def test_nothing_is_left_when_all_have_closed_or_were_killed(start: Start, root: str) -> None:
    consumer, producer, third = start(), start(), start()
    producer.put("k", BIG, 4)
    third.put("l", BIG, 4)
    third.kill()
    consumer.close()
    producer.close()
    assert os.listdir(root) == []


def test_a_forked_child_inherits_nothing(start: Start) -> None:
    consumer, producer = start(), start()
    producer.put("a", BIG, 3)
    told = producer.fork_and_use()
    assert told[0].startswith("TransportClosedError")
    assert told[1].startswith("TransportClosedError")
    assert told[2:] == ["0", "closed"]
    assert consumer.get("a") == (BIG, 3)
    assert held(producer) == (0, 0)


def test_a_forked_child_keeps_no_sender_alive(start: Start) -> None:
    consumer, producer = start(), start()
    producer.put("k", BIG, 3)
    child = producer.fork()
    producer.kill()
    try:
        with pytest.raises(DeviceLostError):
            consumer.get("k")
    finally:
        os.kill(child, 9)


def test_a_receiver_that_sees_other_devices_gets_host_memory(start: Start) -> None:
    consumer, producer = start("host-1"), start("host-0")
    producer.put("k", BIG, 6)
    assert consumer.get("k") == (BIG, 6)
    assert producer.health()[2]["device_fallbacks"] == {"unreachable": 1}
    assert (producer.health()[2]["device_held"], consumer.health()[2]["device_opened"]) == (0, 0)


def test_of_two_receivers_both_have_to_see_the_device(start: Start) -> None:
    one, other, producer = start("host-0"), start("host-1"), start("host-0")
    producer.put("k", BIG, 6)
    assert other.get("k") == (BIG, 6)
    other.kill()
    producer.put("l", BIG, 7)
    assert one.get("l") == (BIG, 7)
    facts = producer.health()[2]
    assert (facts["device_tensors"], facts["device_fallbacks"]) == (1, {"unreachable": 1})


def test_the_first_message_to_nobody_goes_through_host_memory(start: Start, arena: ArenaOptions) -> None:
    producer = start(silent=True)
    producer.put("k", BIG, 6)
    consumer = start()
    assert consumer.get("k") == (BIG, 6)
    producer.put("l", BIG, 7)
    assert consumer.get("l") == (BIG, 7)
    facts = producer.health()[2]
    assert (facts["device_tensors"], facts["device_fallbacks"]) == (1, {"no_receiver": 1})


def test_edges_are_told_apart(start: Start) -> None:
    _, producer = start(), start()
    producer.put("k", BIG, 6, edge=(EDGE.target, "other"))
    assert producer.health()[2]["device_fallbacks"] == {"no_receiver": 1}
