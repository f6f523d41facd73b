"""How often the detectors are wrong while the load changes, and how soon they see a fault.

Measured with 8 seeds of 2 hours for each of the five loads (57,600 looks, about 710,000 requests): 2 requests were
taken for hung, both under bursts, no queue for stuck. A hung request was
seen after 5 to 105 s, a standing queue after 5 to 40 s, of services that take 0.6 s.
The tests run a small part of that; `benchmarks.anomaly` has the rates of all detectors.
"""

import random

import pytest

from tests.support.monitored import LOADS, stage
from vllm_omni_sched.monitor.anomaly import MemoryLeak, SickEdge, StageTimeout, StuckQueue

GB = 2**30


def watch_stage(load, seconds, **fault):
    """(hung requests, when the first was found, looks that found the queue stuck, when the first did)."""
    timeout, stuck = StageTimeout(), StuckQueue()
    hung, looks, first_hung, first_stuck = set(), 0, None, None
    for one in stage(load, random.Random(load), seconds, **fault):
        if one.what == "enter":
            timeout.enter("s", one.request_id, one.at)
        elif one.what == "leave":
            timeout.observe("s", one.request_id, one.at)
        stuck.observe("s", one.at, one.waiting, one.running)
        if one.what == "leave":
            stuck.finished("s", one.at, one.service_seconds)
        elif one.what == "look":
            for found in timeout.check(one.at):
                hung.add(found.request_id)
                if one.at >= fault.get("hang_at", 0):  # of false alarms before it the rates above tell
                    first_hung = first_hung or one.at
            if stuck.check(one.at):
                looks += 1
                first_stuck = first_stuck or one.at
    return len(hung), first_hung, looks, first_stuck


@pytest.mark.parametrize("load", LOADS)
def test_a_healthy_stage_is_left_alone_whatever_its_load(load):
    hung, _, looks, _ = watch_stage(load, 1500)  # some 300 looks
    assert hung <= 1
    assert looks == 0


@pytest.mark.parametrize("load", LOADS)
def test_a_hung_request_and_a_standing_queue_are_seen(load):
    _, at, _, _ = watch_stage(load, 1200, hang_at=900)
    assert at is not None
    assert 900 <= at <= 1100
    _, _, _, at = watch_stage(load, 1200, stand_at=900)
    assert at is not None
    assert 900 <= at <= 1000


def memory(load, leak_bytes_per_second):
    rng, watch, noise, alarms = random.Random(load), MemoryLeak(), 0.0, 0
    for now in range(0, 7200, 10):
        expected = 3 * LOADS[load](now)
        in_flight = max(0.0, rng.gauss(expected, expected**0.5))
        noise = 0.9 * noise + rng.gauss(0, 0.044 * GB)
        used = 20 * GB + 0.2 * GB * in_flight + noise + leak_bytes_per_second * now
        watch.observe("w", now, used, 80 * GB, in_flight)
        alarms += bool(watch.check(now))
    return alarms


@pytest.mark.parametrize("load", LOADS)
def test_only_a_leak_is_a_leak(load):
    assert memory(load, 0) == 0
    assert memory(load, 2**20) > 0


def edges(load, slower):
    """(alarms before, transfers of the sick edge until it was found)."""
    rng, watch, before, seen = random.Random(load), SickEdge(), 0, 0
    for now in range(1800):
        rate = LOADS[load](now)
        for edge in range(3):
            for _ in range(min(4, int(rng.expovariate(1) * rate / 2 + rng.random()))):
                sick = edge == 0 and now >= 1500
                in_flight, nbytes = 1 + int(rng.expovariate(1 / rate)), rng.choice([1000, 2**20])
                seconds = (1e-4 + nbytes / 1e9) * (1 + 0.5 * (in_flight - 1)) * (1 + edge) * rng.lognormvariate(0, 0.3)
                watch.observe(str(edge), now, seconds * (slower if sick else 1), nbytes, in_flight)
                seen += sick
        found = watch.check(now)
        if now < 1500:
            before += len(found)
        elif any(one.subject == "0" for one in found):
            return before, seen
    return before, None


@pytest.mark.parametrize("load", LOADS)
def test_only_a_sick_edge_is_sick(load):
    before, seen = edges(load, slower=4.0)
    assert before == 0
    assert seen is not None
    assert seen <= 100
