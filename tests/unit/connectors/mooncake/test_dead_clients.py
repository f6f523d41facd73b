"""What becomes of messages when their sender or receiver ends, is killed, forks or is cut off."""

import time

import numpy as np
import pytest

from tests.support.mooncake import Child, Deployment, Master, received
from tests.support.mooncake_faults import EDGE, MIB, SOON, put
from tests.support.namespaces import Namespace
from vllm_omni_sched.connectors.mooncake import MooncakeOptions
from vllm_omni_sched.connectors.transport import Status

SENDS = """
for i in range(3):
    path.put(make_message(edge, f"m{i}", np.full(int(sys.argv[2]), i, np.uint8)))
say("put")
sys.stdin.readline()
path.close()
say("closed")
"""

RECEIVES = """
def stuck(key):
    say("read")
    time.sleep(60)  # it is killed before
path._store.claim = stuck
received(path, edge, "m")
"""

ENDS = """
path.put(make_message(edge, "m", np.arange(10)))
say("ends")
"""

FORKS = """
import os
path.put(make_message(edge, "mine", 1))
read, write = os.pipe()
if os.fork() == 0:
    import warnings
    answers = []
    for call in (lambda: path.get(edge, "mine"), lambda: path.put(make_message(edge, "theirs", 1))):
        try:
            call()
        except Exception as error:
            answers.append(type(error).__name__)
    answers.append(path.health().status.value)
    path.close()
    os.write(write, " ".join(answers).encode())
    os._exit(0)  # as multiprocessing does
os.close(write)
answer = b""
while more := os.read(read, 1000):
    answer += more
os.wait()
say(answer.decode())
path.put(make_message(edge, "after", 2))
say(received(path, edge, "mine"), received(path, edge, "after"))
"""

PARTITION = """
for line in sys.stdin:
    verb, key = line.split()
    start = time.monotonic()
    if verb == "put":
        path.put(make_message(edge, key, np.full(16 << 20, 5, np.uint8)))
        say("put")
    elif verb == "get":
        got = received(path, edge, key, 30)
        say(None if got is None else bool((got == 5).all()), got is not None and len(got))
    elif verb == "try":
        slowest, got = 0.0, None
        while time.monotonic() - start < 6:
            asked = time.monotonic()
            got = got or path.get(edge, key)
            slowest = max(slowest, time.monotonic() - asked)
        say(got, slowest < 3.0, path.health().status.value)
    elif verb == "health":
        while path.health().status.value != key and time.monotonic() - start < 30:
            time.sleep(0.05)
        say(path.health().status.value)
"""


def test_messages_of_a_sender_that_is_killed_are_missed_and_said(
    own: Deployment, caplog: pytest.LogCaptureFixture
) -> None:
    receiver = own.path(call_timeout_seconds=1.0)
    child = own.child(SENDS, str(MIB))
    assert child.heard() == "put"
    assert (received(receiver, EDGE, "m0") == 0).all()
    child.kill()
    slowest, until = 0.0, time.monotonic() + SOON
    while not receiver.health().facts["vanished"] and time.monotonic() < until:
        asked = time.monotonic()
        assert receiver.get(EDGE, "m1") is None
        slowest = max(slowest, time.monotonic() - asked)
    assert slowest < 5
    assert receiver.health().facts["vanished"] == 1
    assert receiver.health().status is Status.DEGRADED
    assert "left the Mooncake store with its holder" in caplog.text
    live = own.path()
    put(live, "m1", "from another")
    assert received(receiver, EDGE, "m1") == "from another"


def test_a_sender_that_closes_leaves_its_messages_to_others(own: Deployment) -> None:
    receiver = own.path()
    child = own.child(SENDS, str(MIB))
    assert child.heard() == "put"
    child.tell("close")
    assert child.heard() == "closed"
    for i in range(3):
        assert (received(receiver, EDGE, f"m{i}") == i).all()
    assert receiver.get(EDGE, "m0") is None


def test_a_sender_that_closes_alone_says_what_is_lost(own: Deployment, caplog: pytest.LogCaptureFixture) -> None:
    sender = own.path()
    put(sender, "nobody", 1)
    sender.close()
    assert "1 messages that were not received are lost" in caplog.text
    assert sender.health().facts["lost"] == 1


def test_a_receiver_that_dies_before_it_has_taken_a_message_gives_it_back(own: Deployment) -> None:
    sender, other = own.path(), own.path()
    put(sender, "m", np.arange(MIB))
    child = own.child(RECEIVES)
    assert child.heard() == "read"
    child.kill()
    assert np.array_equal(received(other, EDGE, "m"), np.arange(MIB))


def test_a_process_that_forgets_to_close_ends_well(own: Deployment) -> None:
    receiver = own.path()
    child = own.child(ENDS)
    assert child.heard() == "ends"
    assert child.process.wait(SOON) == 0, child.errors()[-2000:]
    assert np.array_equal(received(receiver, EDGE, "m"), np.arange(10))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_leaves_its_parents_path_alone(own: Deployment) -> None:
    child = own.child(FORKS)
    assert child.heard() == "TransportClosedError TransportClosedError closed"
    assert child.heard() == "1 2"


@pytest.mark.slow  # the master and the library must notice that a host is gone
def test_two_hosts_and_a_cut_cable(mooncake: None) -> None:
    """The master and the sender are on one host, the receiver on the other. The library alone hangs for 30 s."""
    here, there = Namespace(), Namespace()
    here.link(there, "10.99.0.1", "10.99.0.2")
    master = Master(here, "10.99.0.1", client_ttl=3)
    children = []
    try:
        for place, host in ((here, "10.99.0.1"), (there, "10.99.0.2")):
            options = MooncakeOptions(
                host=host, master=master.address, proto="tcp", segment="256MB", localbuf="128MB",
                call_timeout_seconds=1.0, slowest_bytes_per_second="32MB",
            )  # fmt: skip
            with place.inside():
                children.append(Child(PARTITION, options.model_dump_json()))
        sender, receiver = children
        sender.tell("put well")
        assert sender.heard() == "put"
        receiver.tell("get well")
        assert receiver.heard() == f"True {16 * MIB}"
        sender.tell("put cut")
        assert sender.heard() == "put"
        here.set_link("down")
        receiver.tell("try cut")
        assert receiver.heard() == "None True sick"
        sender.tell("health healthy")
        assert sender.heard() == "healthy"
        here.set_link("up")
        receiver.tell("get cut")
        assert receiver.heard() == f"True {16 * MIB}"
        receiver.tell("health healthy")
        assert receiver.heard() in ("healthy", "degraded")
        sender.tell("put after")
        assert sender.heard() == "put"
        receiver.tell("get after")
        assert receiver.heard() == f"True {16 * MIB}"
    finally:
        for child in children:
            child.close()
        master.close()
        here.close()
        there.close()
