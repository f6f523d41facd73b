"""What a path promises when its master is missing, dies, comes back or hangs."""

import time
from contextlib import closing

import numpy as np
import pytest

from tests.support.mooncake import Deployment, received
from tests.support.mooncake_faults import EDGE, SOON, is_status, put, stop_asking, wait_for
from vllm_omni_sched.clock import monotonic_seconds
from vllm_omni_sched.config.errors import RendezvousError
from vllm_omni_sched.connectors.medium import RECENT_SECONDS
from vllm_omni_sched.connectors.mooncake import MooncakeTransport
from vllm_omni_sched.connectors.transport import Status


def test_a_missing_master_is_said_within_seconds(own: Deployment) -> None:
    own.master.kill()
    start = time.monotonic()
    with pytest.raises(RendezvousError, match=r"no Mooncake master answers at .* start `mooncake_master`"):
        own.path(connect_timeout_seconds=1.0)
    assert time.monotonic() - start < 5


def test_a_master_that_dies_and_comes_back_says_what_it_has_lost(
    own: Deployment, caplog: pytest.LogCaptureFixture
) -> None:
    sender, receiver = own.path(), own.path()
    for i in range(20):
        put(sender, f"m{i}", np.full(1000 * i, i))
    for i in range(5):
        assert len(received(receiver, EDGE, f"m{i}")) == 1000 * i
    wait_for(lambda: sender.health().facts["consumed"] == 5)
    own.master.kill()
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
    assert received(receiver, EDGE, "meanwhile") == 2
    wait_for(lambda: sender.health().facts["lost"] == 15)
    assert "15 messages that were not known to be received were lost" in caplog.text
    assert "answers again" in caplog.text
    wait_for(lambda: sender.health().facts["in_flight"] == 0)
    assert sender.health().reason == "1 refused, 15 lost"
    assert receiver.health().status is Status.HEALTHY


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
