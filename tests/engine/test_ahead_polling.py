"""Readers of vLLM's message queues leave the processors to others: they sleep between two looks.

The engine core always does, on CPUs; what else reads, while an item is encoded.
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


def test_the_engine_core_sleeps_always_and_longer_from_the_order_of_an_encode_to_its_end(sleeps: list[float]) -> None:
    """Streams of a server on two cores came in bursts of up to 0.2 s, because its engine core polled."""
    bench = Bench()
    bench.decode()
    shm_broadcast.sched_yield()
    assert sleeps == [polling.CORE_SECONDS]
    bench.add("r", 20, [(4, "a")])
    bench.step()
    shm_broadcast.sched_yield()
    assert sleeps[1:] == [polling.BESIDE_ENCODE_SECONDS]
    bench.step(finish=1)
    shm_broadcast.sched_yield()
    assert sleeps[2:] == [polling.CORE_SECONDS]
