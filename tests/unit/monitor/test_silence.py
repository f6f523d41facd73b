"""A replica hangs when it has work, and neither says nor does anything for longer than its stage ever has."""

from vllm_omni_sched.monitor.anomaly import AnomalyKind, Silence


def learned(gap: float = 0.5, **how: float) -> Silence:
    """It has heard its replica speak 32 times, at 0 to 32 gaps."""
    watch = Silence(**how)
    watch.observe("s", 0, 0.0, work=True, computes=False)
    for i in range(32):
        watch.heard("s", 0, gap * (i + 1))
    return watch


def silent(watch: Silence, until: float, **how) -> bool:
    watch.observe("s", 0, until, **({"work": True, "computes": False} | how))
    return bool(watch.check(until))


def test_it_hangs_when_it_is_silent_for_four_times_the_longest_silence():
    watch = learned(0.5)
    assert watch.bound_seconds("s", 0) == 2.0
    assert not silent(watch, 16.0 + 2.0)
    assert silent(watch, 16.0 + 2.1)
    (found,) = watch.check(19.0)
    assert (found.kind, found.subject, found.since) == (AnomalyKind.SILENT_REPLICA, "s replica 0", 18.0)
    assert found.evidence == {"seconds": 3.0, "bound_seconds": 2.0, "replica": 0.0}


def test_a_word_or_some_computing_starts_the_clock_anew():
    watch = learned(0.5)
    assert not silent(watch, 18.0)
    assert not silent(watch, 100.0, computes=True)
    assert not silent(watch, 102.0)
    watch.heard("s", 0, 102.0)
    assert watch.bound_seconds("s", 0) == 8.0  # it has just been silent for 2
    assert not silent(watch, 110.0)
    assert silent(watch, 110.1)
    watch.heard("s", 0, 110.2)
    assert not watch.check(110.2)


def test_without_work_it_may_be_silent():
    watch = learned(0.5)
    assert not silent(watch, 100.0, work=False)
    assert not silent(watch, 1000.0)  # the clock starts when work comes
    assert silent(watch, 1003.0)


def test_what_its_work_is_expected_to_take_gives_it_time():
    watch = learned(0.5)
    assert not silent(watch, 16.0 + 39.0, expected_seconds=10.0)
    assert silent(watch, 16.0 + 41.0, expected_seconds=10.0)


def test_one_that_is_gone_is_forgotten():
    watch = learned(0.5)
    watch.forget("s", 0)
    assert not watch.check(1000.0)
    watch.heard("s", 0, 1000.0)
    assert watch.silent_seconds("s", 0, 1001.0) == 0.0
