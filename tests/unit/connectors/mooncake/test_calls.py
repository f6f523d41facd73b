import threading

import pytest

from vllm_omni_sched.clock import monotonic_seconds, sleep_seconds
from vllm_omni_sched.config.errors import TransportClosedError
from vllm_omni_sched.connectors.mooncake.calls import MAX_HANGING, Calls, HangingError


def test_a_call_returns_or_raises_what_the_function_does() -> None:
    calls = Calls(monotonic_seconds)
    assert calls.run(5, divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        calls.run(5, divmod, 7, 0)
    assert (calls.in_flight, calls.hanging) == (0, 0)
    assert calls.close(1)


def test_a_call_that_hangs_is_given_up_and_its_end_is_heard_of() -> None:
    calls, gate, late = Calls(monotonic_seconds), threading.Event(), threading.Event()
    said = []

    def hangs() -> str:
        gate.wait(20)
        return "after all"

    def ended(value: object) -> None:
        said.append(value)
        late.set()

    start = monotonic_seconds()
    with pytest.raises(HangingError, match=r"hangs within 0\.1 s"):
        calls.run(0.1, hangs, late=ended)
    assert monotonic_seconds() - start < 5
    assert (calls.hanging, calls.in_flight, said) == (1, 1, [])
    assert calls.run(5, len, "others go on") == 12
    assert not calls.close(0.05)
    gate.set()
    assert late.wait(60)
    assert said == ["after all"]
    assert calls.close(5)
    assert calls.hanging == 0


def test_so_many_hang_and_the_next_is_refused_at_once() -> None:
    calls, gate, refused = Calls(monotonic_seconds), threading.Event(), []
    for _ in range(MAX_HANGING):
        with pytest.raises(HangingError):
            calls.run(0.001, gate.wait, 20)
    with pytest.raises(HangingError, match=f"{MAX_HANGING} calls"):
        calls.run(20, len, "", late=lambda value: refused.append((value, calls._lock.locked())))
    assert refused == [(None, False)]
    gate.set()
    assert calls.close(5)


def test_after_close_no_call_begins_and_close_waits_for_those_in_flight() -> None:
    calls, begun = Calls(monotonic_seconds), threading.Event()
    ended = []

    def slow() -> None:
        begun.set()
        sleep_seconds(0.2)
        ended.append(True)

    caller = threading.Thread(target=calls.run, args=(5, slow))
    caller.start()
    assert begun.wait(60)
    assert calls.close(5)
    assert ended == [True]
    with pytest.raises(TransportClosedError):
        calls.run(5, len, "")
    caller.join()


def test_many_threads_at_once() -> None:
    calls, wrong = Calls(monotonic_seconds), []

    def asks(number: int) -> None:
        for i in range(200):
            if calls.run(5, divmod, number, i + 1) != divmod(number, i + 1):
                wrong.append((number, i))

    threads = [threading.Thread(target=asks, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert calls.close(5)
