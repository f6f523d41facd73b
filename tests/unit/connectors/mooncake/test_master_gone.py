"""What a path promises when its master is missing, dies, comes back or hangs."""

import threading
import time
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from tests.support.mooncake import Deployment, received
from tests.support.mooncake_faults import EDGE, SOON, is_status, put, stop_asking, wait_for
from vllm_omni_sched.clock import monotonic_seconds
from vllm_omni_sched.config.errors import RendezvousError
from vllm_omni_sched.connectors.mooncake import MooncakeTransport
from vllm_omni_sched.connectors.mooncake.store import NO_ROOM
from vllm_omni_sched.connectors.recent_losses import RECENT_SECONDS
from vllm_omni_sched.connectors.transport import Status


def test_a_missing_master_is_said_within_seconds(own: Deployment) -> None:
    own.master.kill()
    start = time.monotonic()
    with pytest.raises(RendezvousError, match=r"no Mooncake master answers at .* start `mooncake_master`"):
        own.path(connect_timeout_seconds=1.0)
    assert time.monotonic() - start < 5


def test_a_master_that_dies_and_comes_back_loses_nothing(own: Deployment, caplog: pytest.LogCaptureFixture) -> None:
    sender, receiver = own.path(), own.path()
    for i in range(20):
        put(sender, f"m{i}", np.full(1000 * i, i))
    put(sender, "replaced", "old")
    put(sender, "replaced", "new")
    for i in range(5):
        assert len(received(receiver, EDGE, f"m{i}")) == 1000 * i
    own.master.kill()  # the sender has not yet heard of all that was got
    wait_for(is_status(sender, Status.SICK))
    wait_for(is_status(receiver, Status.SICK))
    assert "does not answer" in sender.health().reason
    start = time.monotonic()
    assert receiver.get(EDGE, "m7") is None
    with pytest.raises(RendezvousError, match="does not answer"):
        put(sender, "meanwhile", 1)
    assert time.monotonic() - start < 1
    own.master.start()
    put(sender, "meanwhile", 2, deadline=monotonic_seconds() + SOON)
    for i in range(5, 20):
        assert (received(receiver, EDGE, f"m{i}") == i).all()
    assert received(receiver, EDGE, "replaced") == "new"
    assert received(receiver, EDGE, "meanwhile") == 2
    for i in range(5):
        assert receiver.get(EDGE, f"m{i}") is None
    assert sender.health().facts["restored"] >= 16
    assert sender.health().facts["lost"] == 0
    assert "answers again" in caplog.text
    assert sender.health().reason == "1 refused"
    assert receiver.health().status is Status.HEALTHY


def test_what_was_got_is_not_delivered_again_after_the_master_came_back(own: Deployment) -> None:
    """A sender that has not heard yet that a message was got cannot know, and puts it again."""
    sender, receiver = own.path(), own.path()
    stop_asking(sender)
    put(sender, "once", "only")
    put(sender, "other", 1)
    assert received(receiver, EDGE, "once") == "only"
    own.master.kill()
    own.master.start()
    wait_for(lambda: sender.reap() or sender.health().facts["restored"] >= 2)
    assert received(receiver, EDGE, "other") == 1
    assert received(receiver, EDGE, "once", seconds=1.0) is None
    assert receiver.health().facts["repeated"] == 1


def test_two_threads_that_miss_the_beacon_put_again_once(own: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one has just seen that the master has forgotten, the other puts again what is got at once."""
    sender, receiver, third = own.path(), own.path(), own.path()
    stop_asking(sender)
    put(sender, "once", "only")
    own.master.kill()
    own.master.start()
    exist, got = sender._store.exist, []

    def is_overtaken(keys: list[str]) -> list[bool]:
        there = exist(keys)
        if not there[-1] and not got:
            got.append("")
            other = threading.Thread(target=wait_for, args=(lambda: sender.reap() or sender._outbox.counts.restored,))
            other.start()
            other.join()
            got[0] = received(receiver, EDGE, "once")
        return there

    monkeypatch.setattr(sender._store, "exist", is_overtaken)
    wait_for(lambda: sender.reap() or got)
    assert got == ["only"]
    assert sender._outbox.counts.restored == 1
    wait_for(lambda: sender.reap() or not sender._outbox.sent)
    assert (sender._outbox.counts.restored, sender._outbox.counts.consumed) == (1, 1)
    assert received(third, EDGE, "once", seconds=0.2) is None


def test_putting_again_that_stops_half_way_goes_on_from_there(own: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver, third = own.path(), own.path(), own.path()
    stop_asking(sender)
    put(sender, "first", 1)
    put(sender, "second", 2)
    second = list(sender._outbox.sent)[1]
    own.master.kill()
    own.master.start()
    put_from, refused = sender._store.put_from, []

    def takes_only_the_first(key: str, *arguments: Any) -> int:
        if key == second and not refused:
            refused.append(key)
            return NO_ROOM
        return put_from(key, *arguments)

    monkeypatch.setattr(sender._store, "put_from", takes_only_the_first)
    wait_for(lambda: sender.reap() or refused)
    assert received(receiver, EDGE, "first") == 1
    wait_for(lambda: sender.reap() or sender._outbox.counts.restored >= 2)
    assert received(third, EDGE, "second") == 2
    wait_for(lambda: sender.reap() or not sender._outbox.sent)
    assert (sender._outbox.counts.restored, sender._outbox.counts.consumed) == (2, 2)
    assert received(third, EDGE, "first", seconds=0.2) is None


def test_what_the_master_lost_and_nobody_has_a_copy_of_is_said(
    own: Deployment, caplog: pytest.LogCaptureFixture
) -> None:
    sender = own.path(retain=False)
    put(sender, "gone", "with the master")
    own.master.kill()
    own.master.start()
    wait_for(is_status(sender, Status.DEGRADED))
    assert sender.health().reason == "1 lost"
    assert "was lost by the Mooncake master" in caplog.text
    assert sender.health().facts["in_flight"] == 0


def test_what_went_wrong_is_spoken_of_for_a_while(own: Deployment) -> None:
    later = [0.0]
    with closing(MooncakeTransport(own.options(), clock=lambda: monotonic_seconds() + later[0])) as path:
        stop_asking(path)
        path._outbox.counts.expired += 1
        assert (path.health().status, path.health().reason) == (Status.DEGRADED, "1 expired")
        later[0] += RECENT_SECONDS + 1
        assert path.health().status is Status.HEALTHY
        path._outbox.counts.expired += 1
        assert (path.health().status, path.health().reason) == (Status.DEGRADED, "2 expired")


def test_what_an_outage_refused_ends_with_it(own: Deployment) -> None:
    """Nothing is on its way, and that edge puts nothing more."""
    sender = own.path()
    own.master.kill()
    with pytest.raises(RendezvousError):
        put(sender, "k", 1)
    assert sender.health().status is Status.SICK
    own.master.start()
    wait_for(is_status(sender, Status.DEGRADED))
    assert sender.health().reason == "1 refused"


@pytest.mark.slow  # the master is stopped for six seconds
def test_a_master_that_hangs_holds_nobody_up(own: Deployment) -> None:
    sender, receiver = own.path(call_timeout_seconds=0.5), own.path(call_timeout_seconds=0.5)
    put(sender, "before", 1)
    own.master.pause(6.0)
    start = time.monotonic()
    with pytest.raises(RendezvousError):
        put(sender, "during", 2)
    assert time.monotonic() - start < 2
    start = time.monotonic()
    while time.monotonic() - start < 3:
        asked = time.monotonic()
        assert receiver.get(EDGE, "before") is None
        assert time.monotonic() - asked < 1.5
    assert sender.health().status is Status.SICK
    assert receiver.health().status is Status.SICK
    assert receiver.health().facts["calls_given_up"] < 10
    assert received(receiver, EDGE, "before", seconds=SOON) == 1
    wait_for(lambda: sender.health().status is not Status.SICK)
    put(sender, "during", 3, deadline=monotonic_seconds() + SOON)
    assert received(receiver, EDGE, "during") == 3  # not what was given up
    time.sleep(0.3)  # another one would be found by now
    assert receiver.get(EDGE, "during") is None
