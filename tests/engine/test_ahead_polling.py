"""Readers of vLLM's message queues leave the processors to others: they sleep between two looks.

The engine core does in any wait that lasts, on CPUs; what else reads, while an item is encoded.
"""

from __future__ import annotations

import math

import pytest
from vllm.distributed.device_communicators import shm_broadcast

from tests.engine.harness.bench import Bench
from vllm_omni_sched.engine.ahead import polling


class Encoder:
    def __init__(self) -> None:
        self.encoding = False


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr(polling, "sleep_seconds", found.append)
    monkeypatch.setattr(polling, "_readers", polling.Readers())  # without those of other tests
    return found


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, as the only entry."""
    now = [100.0]
    monkeypatch.setattr(polling, "monotonic_seconds", lambda: now[0])
    return now


def test_the_engine_core_polls_first_and_sleeps_in_waits_that_last(sleeps: list[float], at: list[float]) -> None:
    """Steps of a millisecond would take a fifth longer."""
    polling.rest_between_looks()
    for _ in range(2):  # waits for two steps
        sleeps.clear()
        for _ in range(10):
            shm_broadcast.sched_yield()
            at[0] += 0.0001
        assert sleeps == []
        at[0] += 0.00005
        for _ in range(10):
            shm_broadcast.sched_yield()
            at[0] += 0.0001
        assert sleeps == [polling.CORE_SECONDS] * 10
        at[0] += 0.001  # the next step is scheduled


def test_a_reader_sleeps_while_an_encode_is_under_way(sleeps: list[float]) -> None:
    encoder = Encoder()
    polling.sleep_beside(encoder)
    reader = object.__new__(shm_broadcast.SpinCondition)  # without the sockets, which it needs after a busy time
    reader.is_reader, reader.last_read, reader.busy_loop_s = True, 0.0, math.inf
    reader.wait()
    assert sleeps == []
    encoder.encoding = True
    reader.wait()
    assert sleeps == [polling.BESIDE_ENCODE_SECONDS]


def test_a_reader_polls_as_vllm_does_while_nothing_is_encoded(sleeps: list[float]) -> None:
    encoder = Encoder()
    polling.sleep_beside(encoder)
    shm_broadcast.sched_yield()
    assert sleeps == []
    encoder.encoding = True
    shm_broadcast.sched_yield()
    assert len(sleeps) == 1
    del encoder  # it has ended in the middle of an encode
    shm_broadcast.sched_yield()
    assert len(sleeps) == 1


def test_the_engine_core_sleeps_longer_from_the_order_of_an_encode_to_its_end(
    sleeps: list[float], at: list[float]
) -> None:
    """A client on the two cores of a server had its tokens in bursts, because the engine core polled."""
    bench = Bench()
    bench.decode()

    def wait() -> None:
        for _ in range(12):
            shm_broadcast.sched_yield()
            at[0] += 0.0001

    wait()
    assert set(sleeps) == {polling.CORE_SECONDS}
    bench.add("r", 20, [(4, "a")])
    bench.step()
    sleeps.clear()
    wait()
    assert sleeps == [polling.BESIDE_ENCODE_SECONDS] * 12
    bench.step(finish=1)
    sleeps.clear()
    wait()
    assert set(sleeps) == {polling.CORE_SECONDS}
