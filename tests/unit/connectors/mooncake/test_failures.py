"""What a path promises when others die, hang or are cut off. Each test breaks a deployment of its own."""

import threading
import time
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from tests.support.mooncake import Child, Deployment, Master, Namespace, received
from vllm_omni_sched.clock import monotonic_seconds
from vllm_omni_sched.connectors.base import Edge, Status
from vllm_omni_sched.connectors.framing import make_message
from vllm_omni_sched.connectors.lately import LATELY
from vllm_omni_sched.connectors.mooncake import MooncakeOptions, MooncakePath
from vllm_omni_sched.connectors.mooncake.calls import HangingError
from vllm_omni_sched.connectors.mooncake.store import NO_ROOM, MasterGoneError
from vllm_omni_sched.errors import NoRoomError, RendezvousError

EDGE = Edge("0", "1")
MIB = 1 << 20
SOON = 15.0  # seconds, where nothing should take one


def put(path: MooncakePath, key: str, payload: Any, deadline: float | None = None) -> int:
    return path.put(make_message(EDGE, key, payload), deadline)


def _stop_asking(path: MooncakePath) -> None:
    """It asks the master only when we say so."""
    path._closed = True
    path._wake.set()
    path._keeper.join()
    path._closed = False


def wait_for(what: Any, seconds: float = SOON) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.02)


def is_status(path: MooncakePath, status: Status) -> Any:
    return lambda: path.health().status is status


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
    _stop_asking(sender)
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
    _stop_asking(sender)
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
    _stop_asking(sender)
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


@pytest.mark.parametrize("fails", ["to replace", "to link"])
def test_a_put_that_fails_half_way_leaves_nothing(own: Deployment, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    sender = own.path()
    _stop_asking(sender)
    put(sender, "k", np.zeros(MIB, np.uint8))
    remove, put_from, failed, stored = sender._store.remove, sender._store.put_from, [], []

    def remove_fails(keys: list[str]) -> list[int]:
        if fails == "to replace" and not failed:
            failed.append(keys)
            raise MasterGoneError("gone for a moment")
        return remove(keys)

    def link_fails(key: str, *arguments: Any) -> int:
        if fails == "to link" and key.endswith("/link"):
            failed.append(key)
            return NO_ROOM
        stored.append(key)
        return put_from(key, *arguments)

    monkeypatch.setattr(sender._store, "remove", remove_fails)
    monkeypatch.setattr(sender._store, "put_from", link_fails)
    with pytest.raises(RendezvousError):
        put(sender, "k", np.ones(MIB, np.uint8))
    assert (len(failed), len(stored)) == (1, 1)
    assert sender._store.exist(stored) == [False]
    assert sender.discard("k") == (fails == "to replace")
    assert sender._rooms.used_bytes == 0


def test_memory_that_a_hanging_call_reads_comes_back_when_it_ends(
    own: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = own.path()
    _stop_asking(sender)
    put(sender, "k", np.zeros(MIB, np.uint8))
    ((stored, sent),) = sender._outbox.sent.items()
    own.master.kill()
    own.master.start()
    put_from, ends = sender._store.put_from, []

    def hangs(key: str, address: int, nbytes: int, config: Any, late: Any) -> int:
        if key != stored:
            return put_from(key, address, nbytes, config, late)
        ends.append(late)
        raise HangingError("it hangs")

    monkeypatch.setattr(sender._store, "put_from", hangs)
    wait_for(lambda: sender.reap() or ends)
    assert sender.discard("k") == 0  # the master does not have it
    assert sender._rooms.used_bytes >= sent.nbytes
    for end in ends:
        end(None)
    assert sender._rooms.used_bytes == 0


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
    with closing(MooncakePath(own.options(), clock=lambda: monotonic_seconds() + later[0])) as path:
        _stop_asking(path)
        path._outbox.counts.expired += 1
        assert (path.health().status, path.health().reason) == (Status.DEGRADED, "1 expired")
        later[0] += LATELY + 1
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
    time.sleep(0.3)
    assert receiver.get(EDGE, "during") is None


SENDS = """
for i in range(3):
    path.put(make_message(edge, f"m{i}", np.full(int(sys.argv[2]), i, np.uint8)))
say("put")
sys.stdin.readline()
path.close()
say("closed")
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
    assert "its holder has died" in caplog.text
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
    assert "1 messages that nobody got are lost" in caplog.text
    assert sender.health().facts["lost"] == 1


def test_what_was_taken_after_all_is_there_for_the_next_get(own: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library removed it for us after we had given up waiting: nobody else can have it any more."""
    sender, receiver = own.path(), own.path(call_timeout_seconds=0.3)
    put(sender, "late", np.arange(MIB))
    claim = receiver._store.claim

    def claims_slowly(key: str) -> int:
        time.sleep(1.0)
        return claim(key)

    monkeypatch.setattr(receiver._store, "claim", claims_slowly)
    start = time.monotonic()
    while receiver.health().facts["unreachable"] == 0:
        assert receiver.get(EDGE, "late") is None
    assert time.monotonic() - start < 0.9
    assert np.array_equal(received(receiver, EDGE, "late"), np.arange(MIB))
    wait_for(lambda: sender.health().facts["consumed"] == 1)
    assert receiver.get(EDGE, "late") is None


RECEIVES = """
def stuck(key):
    say("read")
    time.sleep(60)
path._store.claim = stuck
received(path, edge, "m")
"""


def test_a_receiver_that_dies_before_it_has_taken_a_message_gives_it_back(own: Deployment) -> None:
    sender, other = own.path(), own.path()
    put(sender, "m", np.arange(MIB))
    child = own.child(RECEIVES)
    assert child.heard() == "read"
    child.kill()
    assert np.array_equal(received(other, EDGE, "m"), np.arange(MIB))


def fill(path: MooncakePath) -> tuple[int, str]:
    """Put messages of 1 MiB until there is no room: how many, and what is said then."""
    for count in range(1000):
        try:
            put(path, f"m{count}", np.full(MIB, count, np.uint8))
        except NoRoomError as error:
            return count, str(error)
    raise AssertionError("the store never was full")


def test_a_full_store_says_so_and_takes_more_once_something_was_got(mooncake: None) -> None:
    """Meanwhile the master evicts what is not pinned, got or not: above 90%, here above 50%."""
    with Deployment(eviction_high_watermark_ratio=0.5, default_kv_lease_ttl=1) as deployment, deployment.inside():
        sender, receiver = deployment.path(segment="64MB", retain=False), deployment.path(segment=0)
        count, said = fill(sender)
        assert said.startswith("no room for")
        assert "raise its `segment`" in said
        assert count > 50
        time.sleep(2)
        threading.Timer(0.3, lambda: received(receiver, EDGE, "m0")).start()
        put(sender, "more", np.full(MIB, 99, np.uint8), deadline=monotonic_seconds() + SOON)
        assert receiver.health().facts["got"] == 1
        for i in range(1, count):
            assert (received(receiver, EDGE, f"m{i}") == i).all()
        assert (received(receiver, EDGE, "more") == 99).all()


def test_a_lease_shorter_than_the_transfer_loses_nothing(mooncake: None) -> None:
    with Deployment(default_kv_lease_ttl=1) as deployment, deployment.inside():
        sender, receiver = deployment.path(), deployment.path()
        sent = np.random.default_rng(0).integers(0, 256, 64 * MIB, np.uint8)
        put(sender, "slow", sent)
        assert np.array_equal(received(receiver, EDGE, "slow"), sent)


def test_copies_make_way_for_new_messages(own: Deployment) -> None:
    """And what has no copy any more is said to be lost when the master loses it."""
    sender, receiver = own.path(localbuf="16MB"), own.path()
    for i in range(10):
        put(sender, f"m{i}", np.full(4 * MIB, i, np.uint8))
    assert sender.health().facts["copies"] <= 4
    for i in range(4):
        assert (received(receiver, EDGE, f"m{i}") == i).all()
    wait_for(lambda: sender.health().facts["in_flight"] == 6)
    copies = sender.health().facts["copies"]
    own.master.kill()
    own.master.start()
    wait_for(lambda: sender.health().facts["lost"])
    wait_for(lambda: sender.health().facts["restored"] == copies)
    assert sender.health().facts["lost"] == 6 - copies
    assert (received(receiver, EDGE, "m9") == 9).all()


CLOSES = """
import threading
from vllm_omni_sched.errors import ConnectorError
said, ended = [], []
def busy(number):
    try:
        for i in range(10**6):
            path.put(make_message(edge, f"{number}-{i}", np.zeros(1 << 20, np.uint8)))
            while path.get(edge, f"{number}-{i}") is None:
                pass
    except ConnectorError as error:
        said.append(type(error).__name__)
threads = [threading.Thread(target=busy, args=(number,)) for number in range(6)]
for thread in threads:
    thread.start()
time.sleep(1)
path.close()
for thread in threads:
    thread.join()
say(*sorted(set(said)), len(said))
"""


def test_closing_while_calls_are_in_flight(own: Deployment) -> None:
    """Any call into the library after its close would kill the process."""
    child = own.child(CLOSES)
    assert child.heard() == "PathClosedError 6"
    child.process.stdin.close()  # type: ignore[union-attr]
    assert child.process.wait(SOON) == 0, child.errors()[-2000:]


ENDS = """
path.put(make_message(edge, "m", np.arange(10)))
say("ends")
"""


def test_a_process_that_forgets_to_close_ends_well(own: Deployment) -> None:
    receiver = own.path()
    child = own.child(ENDS)
    assert child.heard() == "ends"
    assert child.process.wait(SOON) == 0, child.errors()[-2000:]
    assert np.array_equal(received(receiver, EDGE, "m"), np.arange(10))


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


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_leaves_its_parents_path_alone(own: Deployment) -> None:
    child = own.child(FORKS)
    assert child.heard() == "PathClosedError PathClosedError closed"
    assert child.heard() == "1 2"


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
