"""Progressive batching: its rules as tables, and its promises as properties."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.gates import Asked, some
from vllm_omni_sched.resource.pipeline.replica_state import ReplicaState
from vllm_omni_sched.resource.pipeline.stage_gate import StageGate
from vllm_omni_sched.resource.pipeline.stage_limits import ProgressiveWindow


def run(window, units, seconds, times=1, now=0.0):
    """Long work alone, one after the other; the window after each."""
    found = []
    for number in range(times):
        window.begin(f"{now} {number}", units, now)
        now += seconds
        window.through(f"{now - seconds} {number}", now)
        found.append(window.units)
    return found


def test_the_window_grows_by_what_ran_while_the_target_is_met_and_no_further_than_is_used():
    window = ProgressiveWindow(first_units=64)
    assert window.units == 64
    assert run(window, 1000, 1.0, times=4) == [2000, 4000, 4000, 4000]


def test_it_never_shrinks_below_the_first_units():
    window = ProgressiveWindow(first_units=64)
    assert run(window, 100, 9.0, times=3) == [64, 64, 64]


LONG, SHORT = 500, 0


def gate_plan(gate, waiting, *replicas):
    for name, units in waiting.items():
        gate.comes(*some(name, units=units))
    return [one.request_id for one in gate.plan(*replicas).releases], gate.held()


def test_short_work_goes_beside_long_work_that_waits():
    gate = Asked(StageGate(max_hold_seconds=0))
    busy = ReplicaState(0, in_flight=1, limit=8, units=500, units_limit=800)
    assert gate_plan(gate, {"l": LONG, "s": SHORT, "m": 300}, busy) == (["m", "s"], ["l"])


def test_what_is_larger_than_the_window_goes_alone():
    idle = ReplicaState(0, limit=8, units_limit=64)
    assert gate_plan(Asked(), {"a": LONG, "b": LONG}, idle) == (["a"], ["b"])


def test_each_replica_has_a_window_of_its_own():
    idle = [ReplicaState(i, limit=8, units_limit=64) for i in range(2)]
    assert gate_plan(Asked(), {"a": LONG, "b": LONG, "c": LONG}, *idle) == (["a", "b"], ["c"])


def test_one_that_was_passed_over_too_often_is_the_next_long_one_and_short_ones_go_on():
    gate = Asked(StageGate(max_hold_seconds=0, max_passed=2))
    busy = ReplicaState(0, in_flight=1, limit=8, units=100, units_limit=400)
    assert gate_plan(gate, {"h": LONG, "a": 100, "b": 100}, busy)[0] == ["a", "b"]
    made = gate_plan(gate, {"c": 100, "s": SHORT}, busy)
    assert made == (["s"], ["h", "c"])
    free = ReplicaState(0, in_flight=1, limit=8, units=0, units_limit=400)
    assert gate_plan(gate, {}, free) == (["h"], ["c"])


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 6))
def test_all_work_is_done_once_and_what_runs_stays_within_the_window(seed, num_replicas, max_passed):
    """Run a stage by hand with long and short work and fast and slow replicas; nobody starves."""
    rng = random.Random(seed)
    gate = StageGate(max_hold_seconds=0, max_passed=max_passed)
    first = rng.randint(1, 20)
    windows = [ProgressiveWindow(first, target_seconds=2.0) for _ in range(num_replicas)]
    sizes: dict[str, int] = {}
    waiting: dict[str, int] = {}
    running: dict[str, tuple[int, float]] = {}
    done: list[str] = []
    now = 0.0
    for step in range(400):
        now += 1.0
        if step < 60:
            for number in range(rng.randint(0, 3)):
                name = f"{step:03}.{number}"
                waiting[name] = sizes[name] = int(rng.paretovariate(0.7))
                (newest_first,) = some([name], place=-step, units=windows[0].counted(waiting[name]))
                gate.put(newest_first, now)
        states = tuple(
            ReplicaState(
                i,
                in_flight=sum(one[0] == i for one in running.values()),
                limit=4,
                units=window.running,
                units_limit=window.units,
            )
            for i, window in enumerate(windows)
        )
        for one in gate.release(now, states, rng).releases:
            window, units = windows[one.replica_id], waiting.pop(one.request_id)
            ran = window.running
            window.begin(one.request_id, units, now)
            running[one.request_id] = one.replica_id, now + rng.choice([0.5, 1, 3, 6])
            assert not window.counted(units) or not ran or window.running <= window.units
        for name in [name for name, (_, ends) in running.items() if ends <= now]:
            replica_id, _ = running.pop(name)
            windows[replica_id].through(name, now)
            done.append(name)
        for i, window in enumerate(windows):
            there = [sizes[name] for name, (at, _) in running.items() if at == i]
            assert window.running == sum(map(window.counted, there))
            assert window.units >= first
    assert sorted(done) == sorted(sizes)
