"""What each detector finds, rule by rule; how often it is wrong is in test_anomaly_rates.py."""

import math
import random

import numpy as np
import pytest

from vllm_omni_sched.monitor.anomaly import AnomalyKind, MemoryLeak, SickEdge, StageTimeout, StuckQueue

GB = 2**30


def taught(seconds=1.0, stays=64, **options):
    """A stage where a request takes about so long."""
    rng, watch = random.Random(0), StageTimeout(**options)
    for number in range(stays):
        watch.enter("s", f"r{number}", 10.0 * number)
        watch.observe("s", f"r{number}", 10.0 * number + seconds * rng.lognormvariate(0, 0.3))
    return watch


def test_a_request_times_out_by_the_history_of_its_stage():
    watch = taught()
    bound = watch.bound_seconds("s", 1)
    assert 3 < bound < 30
    watch.enter("s", "hangs", 1000.0)
    assert watch.check(1000.0 + bound - 0.1) == ()
    (found,) = watch.check(1000.0 + 2 * bound)
    assert (found.kind, found.subject, found.request_id) == (AnomalyKind.STAGE_TIMEOUT, "s", "hangs")
    assert found.evidence["seconds"] == pytest.approx(2 * bound)
    watch.observe("s", "hangs", 2000.0, finished=False)
    assert watch.check(3000.0) == ()


def test_the_bound_grows_with_a_load_that_was_never_seen_and_is_capped():
    watch = taught(cap_seconds=100.0)
    alone = watch.bound_seconds("s", 1)
    assert watch.bound_seconds("s", 4) == pytest.approx(4 * alone)
    assert watch.bound_seconds("s", 1000) == 100.0
    assert StageTimeout(cap_seconds=100.0).bound_seconds("s", 1) == 100.0


def test_an_aborted_stay_teaches_nothing():
    watch = taught(stays=31, least_samples=32, cap_seconds=500.0)
    watch.enter("s", "gone", 0.0)
    watch.observe("s", "gone", 1.0, finished=False)
    assert watch.bound_seconds("s", 1) == 500.0


def busy(**options):
    watch, rng = StuckQueue(**options), random.Random(0)
    for number in range(64):
        watch.observe("s", 10.0 * number, 0, 1)
        watch.observe("s", 10.0 * number + 1, 0, 0)
        watch.finished("s", 10.0 * number + 1, rng.lognormvariate(0, 0.3))
    return watch


@pytest.mark.parametrize(("waiting", "running"), [(3, 0), (3, 1), (0, 1)])
def test_a_queue_is_stuck_when_there_is_work_and_nothing_ends(waiting, running):
    watch = busy()
    watch.observe("s", 1000.0, waiting, running)
    bound = watch.bound_seconds("s")
    assert 2 < bound < 20
    assert watch.check(1000.0 + bound - 0.1) == ()
    (found,) = watch.check(1000.0 + bound + 0.1)
    assert found.kind is AnomalyKind.STUCK_QUEUE
    watch.finished("s", 1000.0 + bound + 0.2, 1.0)
    assert watch.check(1000.0 + bound + 0.3) == ()


def test_an_idle_stage_is_not_stuck_however_long():
    watch = busy()
    assert watch.check(1e6) == ()
    watch.observe("s", 1e6, 0, 1)
    assert watch.check(1e6 + 0.5) == ()


def test_a_batch_that_began_together_may_end_together():
    watch = busy()
    alone = watch.bound_seconds("s")
    watch.observe("s", 1000.0, 0, 8)
    assert watch.bound_seconds("s") == pytest.approx(8 * alone)


def feed(watch, used, seconds=7200, load=lambda now: 4.0):
    rng = np.random.default_rng(0)
    for now in range(0, seconds, 10):
        watch.observe("w", now, used(now, load(now)) + rng.normal(0, 0.05 * GB), 80 * GB, load(now))
    return watch.check(seconds)


def test_a_leak_is_found_and_forgotten_with_the_process():
    watch = MemoryLeak()
    (found,) = feed(watch, lambda now, load: 20 * GB + 2**20 * now)
    assert found.kind is AnomalyKind.MEMORY_LEAK
    assert found.evidence["bytes_per_second"] == pytest.approx(2**20, rel=0.05)
    watch.forget("w")
    assert watch.check(7200) == ()


@pytest.mark.parametrize(
    ("used", "load"),
    [
        (lambda now, load: 20 * GB + load * GB, lambda now: 1 + now / 200),  # a ramp of load
        (lambda now, load: 20 * GB + load * GB, lambda now: 4 + 3 * math.sin(now / 900)),
        (lambda now, load: 20 * GB + 5 * GB * (1 - math.exp(-now / 500)), lambda now: 4.0),  # a warm-up
        (lambda now, load: 20 * GB + 1000 * now, lambda now: 4.0),  # a trend that fills nothing within a day
    ],
)
def test_what_grows_with_the_load_or_levels_off_is_no_leak(used, load):
    assert feed(MemoryLeak(), used, load=load) == ()


def healthy(edges=("a", "b", "c"), transfers=300):
    watch, rng = SickEdge(), random.Random(0)
    for number in range(transfers):
        for edge in edges:
            watch.observe(edge, number, 0.01 * rng.lognormvariate(0, 0.3))
    assert watch.check(transfers) == ()
    return watch, rng


def test_an_edge_that_slows_down_is_sick_and_heals():
    watch, rng = healthy()
    for number in range(40):
        watch.observe("a", 300 + number, 0.04 * rng.lognormvariate(0, 0.3))
    assert [(one.kind, one.subject) for one in watch.check(340)] == [(AnomalyKind.SICK_EDGE_LATENCY, "a")]
    for number in range(60):
        watch.observe("a", 340 + number, 0.01 * rng.lognormvariate(0, 0.3))
    assert watch.check(400) == ()


def test_when_all_edges_slow_down_none_is_sick():
    watch, rng = healthy()
    for number in range(100):
        for edge in "abc":
            watch.observe(edge, 300 + number, 0.02 * rng.lognormvariate(0, 0.3))
    assert watch.check(400) == ()


def test_an_edge_that_fails_more_than_it_did_is_sick():
    watch, _ = healthy()
    for number in range(20):
        watch.observe("b", 300 + number, 0.01, ok=number % 2 == 0)
    (found,) = watch.check(320)
    assert (found.kind, found.subject, found.evidence["failed"]) == (AnomalyKind.SICK_EDGE_ERRORS, "b", 10)


def test_the_load_of_a_stay_is_the_most_that_were_there_during_it():
    rng, detector, now = random.Random(3), StageTimeout(), 0.0
    inside: dict[str, int] = {}
    for number in range(2000):
        now += 1.0
        if inside and rng.random() < 0.5:
            name = rng.choice(list(inside))
            state = detector._stages["s"]
            assert state.peak(state.inside[name]) == inside.pop(name)
            detector.observe("s", name, now)
        else:
            detector.enter("s", f"{number}", now)
            inside[f"{number}"] = 0
            inside = {name: max(peak, len(inside)) for name, peak in inside.items()}
