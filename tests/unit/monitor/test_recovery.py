"""Recovery, rule by rule."""

import math
import random

from vllm_omni_sched.monitor.recovery.events import (
    Cleared,
    Deliver,
    Died,
    Dispatched,
    Draining,
    Fail,
    FailReason,
    Finished,
    IncidentKind,
    Joined,
    Record,
    Redispatch,
    Replica,
    Restart,
    Restarted,
    RestartFailed,
    Stays,
    Suspected,
    Tick,
    Wait,
)
from vllm_omni_sched.monitor.recovery.options import RecoveryOptions
from vllm_omni_sched.monitor.recovery.policy import Recovery
from vllm_omni_sched.monitor.recovery.state import Phase

A, B, C, D = Replica(0, 0), Replica(0, 1), Replica(1, 0), Replica(1, 1)
LINE = {0: (), 1: (0,), 2: (1,)}


def recovery(replicas=(A, B), limit=math.inf, **options):
    return Recovery(dict.fromkeys(replicas, limit), LINE, RecoveryOptions(**options), random.Random(1))


def told(actions):
    """Without the records."""
    return [one for one in actions if not isinstance(one, Record)]


def test_requests_of_a_dead_replica_go_on_at_once_elsewhere_and_it_is_restarted():
    one = recovery()
    for name in "ab":
        one.on_event(Dispatched(name, A), 0.0)
    actions = one.on_event(Died(A, "SIGKILL"), 1.0)
    assert told(actions) == [Restart(A), Redispatch("a", B, 2, (0,)), Redispatch("b", B, 2, (0,))]
    assert [(one.kind, one.requests, one.cause) for one in one.history] == [
        (IncidentKind.DIED, 2, "SIGKILL"),
        (IncidentKind.RESTARTING, 0, ""),
    ]
    assert one.on_event(Died(A), 1.1) == () or one.phase(A) is not Phase.HEALTHY


def test_without_another_replica_they_wait_for_the_restart_in_order():
    one = recovery([A], max_wait_seconds=60.0)
    for name in "ab":
        one.on_event(Dispatched(name, A), 0.0)
    assert told(one.on_event(Died(A), 1.0)) == [Restart(A), Wait("a", 61.0), Wait("b", 61.0)]
    assert told(one.on_event(Tick(), 5.0)) == []
    assert told(one.on_event(Restarted(A), 10.0)) == [Redispatch("a", A, 2, (0,)), Redispatch("b", A, 2, (0,))]
    assert one.phase(A) is Phase.BACK
    one.on_event(Finished("a", 2, final=True), 11.0)
    assert one.phase(A) is Phase.HEALTHY


def test_who_waited_too_long_fails():
    one = recovery([A], max_wait_seconds=60.0)
    one.on_event(Dispatched("a", A), 0.0)
    one.on_event(Died(A), 1.0)
    assert one.next_wake() == 61.0
    assert told(one.on_event(Tick(), 61.0)) == [Fail("a", FailReason.WAITED)]


def test_a_poisonous_request_is_given_up_before_it_has_killed_them_all():
    one = recovery(poison_deaths=2, max_redispatches=9)
    one.on_event(Dispatched("bad", A), 0.0)
    assert Redispatch("bad", B, 2, (0,)) in one.on_event(Died(A), 1.0)
    assert Fail("bad", FailReason.POISON) in one.on_event(Died(B), 2.0)


def test_the_last_chance_is_shared_with_few():
    one = recovery(poison_deaths=2, last_chance_together=1)
    for name in "abc":
        one.on_event(Dispatched(name, A), 0.0)
    moved = told(one.on_event(Died(A), 1.0))
    assert moved == [Restart(A), Redispatch("a", B, 2, (0,)), Wait("b", 61.0), Wait("c", 61.0)]
    assert told(one.on_event(Finished("a", 2, final=True), 2.0)) == [Deliver("a"), Redispatch("b", B, 2, (0,))]
    # b kills: c, which waited beside it, is not condemned with it
    assert told(one.on_event(Died(B), 3.0)) == [Fail("b", FailReason.POISON), Restart(B)]
    assert told(one.on_event(Restarted(A), 4.0)) == [Redispatch("c", A, 2, (0,))]


def test_a_suspect_gets_nothing_new():
    one = recovery()
    one.on_event(Dispatched("a", A), 0.0)
    one.on_event(Suspected(B), 0.0)
    assert Wait("a", 60.5) in one.on_event(Died(A), 0.5)
    assert told(one.on_event(Cleared(B), 0.9)) == [Redispatch("a", B, 2, (0,))]


def test_a_death_that_is_reported_again_is_no_failed_restart():
    one = recovery([A], backoff_seconds=1.0)
    assert Restart(A) in one.on_event(Died(A, "the send failed"), 1.0)
    assert one.on_event(Died(A, "a poll of the old client"), 1.1) == ()
    assert one.on_event(Suspected(A), 1.2) == ()
    assert one.on_event(Tick(), 100.0) == ()
    one.on_event(Restarted(A), 101.0)
    assert Restart(A) in one.on_event(Died(A), 102.0)


def test_failed_restarts_back_off_and_open_the_circuit():
    one = recovery([A], max_restarts=3, window_seconds=300.0, backoff_seconds=4.0, max_wait_seconds=500.0)
    one.on_event(Dispatched("a", A), 0.0)
    one.on_event(Died(A), 0.0)
    for now, least, most in ((10.0, 2.0, 4.0), (100.0, 4.0, 8.0)):
        assert told(one.on_event(RestartFailed(A), now)) == []
        assert one.phase(A) is Phase.FAILED
        assert now + least <= one.next_wake() <= now + most
        assert told(one.on_event(Tick(), one.next_wake())) == [Restart(A)]
    assert told(one.on_event(RestartFailed(A), 200.0)) == [Fail("a", FailReason.NO_REPLICA)]
    assert one.phase(A) is Phase.GIVEN_UP
    assert one.next_wake() == 300.0  # the first of the three is then out of the window
    assert told(one.on_event(Tick(), 300.0)) == [Restart(A)]


def test_without_restarts_the_requests_fail_at_once():
    one = recovery([A], restart=False)
    one.on_event(Dispatched("a", A), 0.0)
    assert told(one.on_event(Died(A), 1.0)) == [Fail("a", FailReason.NO_REPLICA)]


def test_a_dispatch_to_a_replica_that_just_died_is_moved():
    one = recovery()
    one.on_event(Died(A), 0.0)
    assert told(one.on_event(Dispatched("a", A), 0.1)) == [Redispatch("a", B, 1, (0,))]


def test_a_replica_that_is_to_leave_gets_no_request_that_lost_its_own():
    one = recovery()
    one.on_event(Dispatched("a", A), 0.0)
    one.on_event(Draining(B), 0.0)
    assert not one.serves(B)
    assert told(one.on_event(Died(A), 1.0)) == [Restart(A), Wait("a", 1.0 + one.options.max_wait_seconds)]
    assert told(one.on_event(Stays(B), 2.0)) == [Redispatch("a", B, 2, (0,))]


def test_one_that_joins_serves_and_dies_as_others_do():
    one = recovery((A,))
    one.on_event(Joined(B), 0.0)
    one.on_event(Joined(B), 0.0)
    assert one.serves(B)
    one.on_event(Dispatched("a", B), 1.0)
    assert told(one.on_event(Died(B), 2.0)) == [Restart(B), Redispatch("a", A, 2, (0,))]
    assert [each.kind for each in one.history].count(IncidentKind.MOVED_IN) == 1
