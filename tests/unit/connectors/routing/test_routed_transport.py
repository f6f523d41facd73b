"""Several paths as one: choice, refusals, return, back-pressure, compression."""

from __future__ import annotations

import re
import threading
from typing import Any

import numpy as np
import pytest

from tests.support.scripted_transport import ScriptedTransport
from vllm_omni_sched.config.errors import (
    ConfigError,
    MessageTooLargeError,
    NoRoomError,
    ReceiverBehindError,
    RendezvousError,
    TransportClosedError,
)
from vllm_omni_sched.connectors.auto import AutoOptions
from vllm_omni_sched.connectors.compression.compressor import Compressor
from vllm_omni_sched.connectors.compression.options import CompressionOptions
from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.extra import read_extra
from vllm_omni_sched.connectors.framing import make_message
from vllm_omni_sched.connectors.routing import RoutedTransport, RoutingOptions
from vllm_omni_sched.connectors.routing.link_speeds import REPORT_EVERY
from vllm_omni_sched.connectors.routing.transport import Way
from vllm_omni_sched.connectors.transport import Status, Traffic

EDGE = Edge("0", "1")


class Stage:
    """A sender and a receiver with the same two transports."""

    def __init__(self, compressor: Compressor | None = None, **options: Any) -> None:
        self.now = [100.0]
        self.near, self.far = ScriptedTransport("near", self.now), ScriptedTransport("far", self.now)
        ways = [Way(self.near, 0), Way(self.far, 1)]
        made = RoutingOptions(**options)
        self.sender, self.receiver = (RoutedTransport(ways, made, compressor, lambda: self.now[0]) for _ in range(2))
        self.count = 0

    def send(self, payload: Any = "x", deadline: float | None = None) -> str:
        """The path that took it; it is got at once."""
        self.count += 1
        before = dict(self.sender.served_bytes)
        self.sender.put(make_message(EDGE, f"k{self.count}", payload), deadline)
        (used,) = [path for (_, path), n in self.sender.served_bytes.items() if n > before.get((EDGE, path), 0)]
        found = self.receiver.get(EDGE, f"k{self.count}")
        assert found is not None
        got = found.open()
        assert np.array_equal(got, payload) if isinstance(payload, np.ndarray) else got == payload
        return used


def test_a_message_goes_within_the_host_and_is_found_whichever_way_it_came() -> None:
    stage = Stage()
    assert stage.send() == "near"
    stage.near.fails = NoRoomError("full")
    assert stage.send() == "far"
    assert stage.receiver.get(EDGE, "k1") is None


def test_a_path_that_refuses_rests_and_returns() -> None:
    stage = Stage()
    stage.near.fails = NoRoomError("full")
    assert stage.send() == "far"
    asked = len(stage.near.puts)
    assert stage.send() == "far"
    assert len(stage.near.puts) == asked, "it was asked again before its time"
    assert stage.sender.health().status is Status.DEGRADED
    stage.now[0] += 0.6
    assert stage.send() == "far"
    assert len(stage.near.puts) == asked + 1
    stage.near.fails = None
    stage.now[0] += 0.6
    assert stage.send() == "far", "twice the rest after the second refusal"
    stage.now[0] += 0.6
    assert stage.send() == "near"
    assert stage.sender.health().status is Status.HEALTHY
    assert stage.sender.fell_back["near"] == 2


def test_what_no_path_takes_is_refused_with_what_each_said() -> None:
    stage = Stage()
    stage.near.fails, stage.far.fails = NoRoomError("shm is full"), NoRoomError("no master")
    with pytest.raises(NoRoomError, match=r"near: shm is full; far: no master"):
        stage.send()
    assert stage.sender.health().status is Status.SICK


def test_only_the_last_path_is_waited_for() -> None:
    stage = Stage()
    stage.near.fails = NoRoomError("full")
    stage.send(deadline=107.0)
    assert stage.near.puts == [("k1", None)]
    assert stage.far.puts == [("k1", 107.0)]


def test_a_receiver_that_is_behind_slows_its_sender_on_every_path() -> None:
    stage = Stage()
    stage.near.fails = ReceiverBehindError("100 messages wait")
    with pytest.raises(ReceiverBehindError):
        stage.send(deadline=101.0)
    assert stage.near.puts == [("k1", None), ("k1", 101.0)]
    assert stage.far.puts == []
    stage.near.fails = None
    assert stage.send() == "near"


def test_a_message_too_large_for_a_path_does_not_make_it_sick() -> None:
    stage = Stage()
    stage.near.fails = MessageTooLargeError("8 GB")
    assert stage.send() == "far"
    stage.near.fails = None
    assert stage.send() == "near"


def test_an_edge_keeps_to_the_paths_that_its_receiver_has() -> None:
    stage = Stage(edges={"0->1": ["far"]})
    assert [stage.send() for _ in range(3)] == ["far"] * 3
    assert stage.near.puts == []


def test_discard_takes_back_wherever_it_is() -> None:
    stage = Stage()
    stage.sender.put(make_message(EDGE, "a", 1))
    stage.near.fails = NoRoomError("full")
    stage.sender.put(make_message(EDGE, "b", 1))
    assert (stage.sender.discard("a"), stage.sender.discard("b"), stage.sender.discard("c")) == (1, 1, 0)
    assert stage.receiver.get(EDGE, "a") is stage.receiver.get(EDGE, "b") is None


def test_buffers_are_compressed_between_hosts_and_never_within_one() -> None:
    stage = Stage(Compressor(CompressionOptions(mode="always", min_bytes=0)))
    ids = np.arange(20_000, dtype=np.int64) % 300
    assert stage.send(ids) == "near"
    assert stage.sender.served_bytes[EDGE, "near"] > ids.nbytes
    stage.near.fails = NoRoomError("full")
    assert stage.send(ids) == "far"
    assert stage.sender.served_bytes[EDGE, "far"] < ids.nbytes / 3
    facts = stage.sender.health().facts
    assert (facts["raw_bytes"], facts["packed_bytes"] < ids.nbytes / 3) == (ids.nbytes, True)


def test_a_slow_link_is_learnt_from_receivers_and_then_spared() -> None:
    stage = Stage(Compressor(CompressionOptions()), edges={"0->1": ["far"]})
    ids = np.arange(200_000, dtype=np.int64) % 300
    sizes = []
    stage.far.get_seconds = 1.0  # 1.6 MB/s
    for _ in range(2 * REPORT_EVERY + 1):
        before = stage.sender.served_bytes[EDGE, "far"]
        stage.send(ids)
        sizes.append(stage.sender.served_bytes[EDGE, "far"] - before)
    assert sizes[0] > ids.nbytes
    assert sizes[-1] < ids.nbytes / 3


def test_a_slow_link_is_learnt_after_a_few_messages_though_there_is_no_other_transport() -> None:
    now = [100.0]
    far = ScriptedTransport("far", now)
    far.get_seconds = 1.0  # 1.6 MB/s
    sender, receiver = (
        RoutedTransport([Way(far, 1)], RoutingOptions(), Compressor(CompressionOptions()), lambda: now[0])
        for _ in range(2)
    )
    ids = np.arange(200_000, dtype=np.int64) % 300
    sizes = []
    for number in range(3):
        sender.put(make_message(EDGE, f"k{number}", ids))
        found = receiver.get(EDGE, f"k{number}")
        assert found is not None
        assert np.array_equal(found.open(), ids)
        sizes.append(sender.served_bytes[EDGE, "far"] - sum(sizes))
    assert sizes[0] > ids.nbytes
    assert sizes[2] < ids.nbytes / 3


def test_without_a_choice_and_without_compression_nothing_is_reported() -> None:
    far = ScriptedTransport("far", [100.0])
    sender, receiver = (RoutedTransport([Way(far, 1)], RoutingOptions(), None) for _ in range(2))
    for number in range(3):
        sender.put(make_message(EDGE, f"k{number}", number))
        assert receiver.get(EDGE, f"k{number}") is not None
    assert len(far.puts) == 3


def test_closed_is_closed() -> None:
    stage = Stage()
    stage.sender.close()
    stage.sender.close()
    assert (stage.near.closed, stage.far.closed) == (True, True)
    with pytest.raises(TransportClosedError):
        stage.sender.put(make_message(EDGE, "k", 1))
    with pytest.raises(TransportClosedError):
        stage.sender.get(EDGE, "k")
    assert stage.sender.health().status is Status.CLOSED


@pytest.mark.parametrize(
    ("ways", "options", "said"),
    [([], {}, "at least one"), (["a", "a"], {}, "different names"), (["a"], {"edges": {"0->1": ["b"]}}, "'0->1'")],
)
def test_what_cannot_work_is_refused(ways: list[str], options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        RoutedTransport([Way(ScriptedTransport(name, [0.0]), 0) for name in ways], RoutingOptions(**options))


def test_a_path_that_cannot_look_does_not_hide_what_came_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(edges={"0->1": ["near", "far"]})
    stage.near.fails = NoRoomError("full")
    stage.sender.put(make_message(EDGE, "k", 1))

    def cannot_look(edge: Edge, key: str) -> None:
        raise RendezvousError("nobody there")

    monkeypatch.setattr(stage.near, "get", cannot_look)
    found = stage.receiver.get(EDGE, "k")
    assert found is not None
    assert found.open() == 1
    with pytest.raises(RendezvousError, match="nobody there"):
        stage.receiver.get(EDGE, "k")


def test_it_says_which_path_has_carried_what_this_thread_has_put_or_got_last() -> None:
    stage = Stage()
    assert stage.sender.carrier() == "auto", "nothing yet"
    stage.send()
    assert (stage.sender.carrier(), stage.receiver.carrier()) == ("near", "near")
    stage.near.fails = NoRoomError("full")
    stage.send()
    assert (stage.sender.carrier(), stage.receiver.carrier()) == ("far", "far")
    elsewhere = []
    thread = threading.Thread(target=lambda: elsewhere.append(stage.sender.carrier()))
    thread.start()
    thread.join()
    assert elsewhere == ["auto"]


def test_reports_that_wait_for_a_sender_are_no_traffic() -> None:
    stage = Stage()
    back = Edge("1", "0")
    stage.near.traffic = lambda: {("near", edge): Traffic() for edge in (EDGE, back)}  # type: ignore[method-assign]
    stage.send()
    assert set(stage.sender.traffic()) == {("near", EDGE)}


def test_what_is_put_again_by_another_path_takes_the_place_of_the_first() -> None:
    stage = Stage()
    stage.sender.put(make_message(EDGE, "k", "old"))
    stage.near.fails = NoRoomError("full")
    stage.sender.put(make_message(EDGE, "k", "new"))
    found = stage.receiver.get(EDGE, "k")
    assert found is not None
    assert found.open() == "new"
    assert stage.receiver.get(EDGE, "k") is None


def test_what_fits_no_path_is_said_to_be_too_large() -> None:
    stage = Stage()
    stage.near.fails = stage.far.fails = MessageTooLargeError("at most 8 bytes")
    with pytest.raises(MessageTooLargeError, match="near: at most 8 bytes; far: at most 8 bytes"):
        stage.send()
    stage.far.fails = NoRoomError("full")
    with pytest.raises(NoRoomError, match="near: at most 8 bytes; far: full"):
        stage.send()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"edges": {"0-1": ["arena"]}}, "'0-1' names no edge: write the ids of its two stages, as '0->1'"),
        ({"edges": {"0->": ["arena"]}}, "'0->' names no edge"),
        ({"edges": {"0 -> 1": ["arena"]}}, "'0 -> 1' names no edge"),
        ({"edges": {"0->1": []}}, "'0->1' has no transport"),
        ({"replicas": {"1": 0}}, "stage '1' must have 1 replica or more, got 0"),
        ({"replicas": {"1": -2}}, "must have 1 replica or more"),
        ({"replicas": {"0->1": 2}}, "'0->1' names no stage"),
        ({"replicas": {"": 2}}, "names no stage"),
    ],
)
def test_keys_that_name_nothing_are_refused(options, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        read_extra(AutoOptions, options)
