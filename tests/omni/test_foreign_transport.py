"""vLLM-Omni's own connectors as paths of ours, the real ones."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory
from vllm_omni.distributed.omni_connectors.utils.config import ConnectorSpec

from tests.contracts.conftest import receiver, sender  # noqa: F401
from tests.contracts.test_transports import (  # noqa: F401 (what a foreign connector can promise, of all promises)
    AB,
    BC,
    get,
    put,
    test_64_megabytes,
    test_a_key_can_be_put_again_when_it_was_got,
    test_a_message_is_found_by_edge_and_key_alone,
    test_discard_takes_back_what_nobody_has_got_on_all_edges,
    test_empty_payloads,
    test_keys_that_look_alike_are_different,
    test_many_threads_put_and_get_and_nothing_is_lost_or_doubled,
    test_one_process_sends_to_itself,
    test_room_comes_back,
    test_the_second_put_of_a_key_replaces_the_first,
    test_two_receivers_and_two_senders,
    test_views_stay_what_they_are_until_they_go,
)
from tests.support.altered import Medium
from tests.support.mooncake import why_not
from tests.support.namespaces import home
from tests.support.transport_kinds import Open, Opened, arena
from vllm_omni_sched.config.errors import ConfigError, CorruptMessageError, TransportClosedError
from vllm_omni_sched.connectors.arena.meeting import ARENA_VARIABLE
from vllm_omni_sched.connectors.auto import ForeignOptions
from vllm_omni_sched.connectors.routing import Way
from vllm_omni_sched.connectors.transport import Status, Transport
from vllm_omni_sched.omni.foreign_transport import foreign_ways
from vllm_omni_sched.plugin import register

pytestmark = pytest.mark.omni
MIB = 1 << 20


def shared_memory() -> Transport:
    return foreign_ways({"shm": ForeignOptions(name="SharedMemoryConnector", distance=0)}, [], {"stage_id": 0})[
        0
    ].transport


def transfer_engine(mail: Transport) -> Transport:
    """Over tcp; its pool on "cpu:0" is memory that is not pinned, which takes a GPU."""
    extra = {"host": "127.0.0.1", "protocol": "tcp", "memory_pool_device": "cpu:0", "memory_pool_size": 192 * MIB}
    options = ForeignOptions(name="MooncakeTransferEngineConnector", extra=extra)
    return foreign_ways({"te": options}, [Way(mail, 0)], {"stage_id": 0})[0].transport


@pytest.fixture
def open_end() -> Iterator[Open]:
    opened = Opened(shared_memory)
    yield opened
    opened.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it leaves sockets open
def test_mooncakes_transfer_engine_over_tcp() -> None:
    if reason := why_not():
        pytest.skip(reason)
    with home().inside(), arena() as open_mail, closing(Opened(lambda: transfer_engine(open_mail()))) as opened:
        one, other = opened(), opened()
        assert other.get(AB, "k0") is None
        for i, nbytes in enumerate((100, 5 * MIB, 64 * MIB)):
            put(one, f"k{i}", {"x": torch.full((nbytes,), i, dtype=torch.uint8)})
            put(one, f"k{i}", "on another edge", BC)
            held = get(other, f"k{i}")["x"]
            assert (held.numel(), held.unique().tolist()) == (nbytes, [i])
            assert get(other, f"k{i}", BC) == "on another edge"
            assert other.get(AB, f"k{i}") is None
            if not i:
                first = held
            del held
        put(one, "again", 1)
        put(one, "again", 2)
        assert get(other, "again") == 2
        put(one, "aborted", 1)
        assert one.discard("aborted") == 1
        assert other.get(AB, "aborted") is None
        assert first.unique().tolist() == [0]
        assert one.health().status is other.health().status is Status.HEALTHY
        del first
        gc.collect()


@pytest.mark.parametrize(
    ("distance", "asked", "looks"), [(1, None, True), (0, None, False), (0, True, True), (1, False, False)]
)
def test_altered_bytes_are_an_error_where_a_path_leaves_the_host_or_it_was_asked_for(
    distance: int, asked: bool | None, looks: bool
) -> None:
    options = ForeignOptions(name="SharedMemoryConnector", distance=distance, checksum=asked)
    with closing(foreign_ways({"shm": options}, [], {"stage_id": 0})[0].transport) as path:
        with Medium() as medium:
            medium.alters = 0, 9
            put(path, "k", {"x": torch.ones(5000, dtype=torch.uint8)})
        if looks:
            with pytest.raises(CorruptMessageError, match="does not fit its buffers"):
                path.get(AB, "k")
            assert path.get(AB, "k") is None
            assert path.health().facts["corrupt"] == 1
        else:
            assert get(path, "k")["x"].sum() == 5000 + 0x10
        put(path, "k", {"x": torch.ones(5000)})
        assert get(path, "k")["x"].sum() == 5000


def test_health_and_close(sender: Transport, receiver: Transport) -> None:  # noqa: F811
    put(sender, "k", {"x": torch.ones(5000)})
    assert get(receiver, "k")["x"].sum() == 5000
    assert (sender.health().status, sender.health().facts["put"]) == (Status.HEALTHY, 1)
    assert (receiver.health().status, receiver.health().facts["got"]) == (Status.HEALTHY, 1)
    assert sender.reap() == 0
    receiver.close()
    receiver.close()
    assert receiver.health().status is Status.CLOSED
    with pytest.raises(TransportClosedError, match="closed before this get"):
        receiver.get(AB, "k")
    with pytest.raises(TransportClosedError, match="closed before this put"):
        put(receiver, "k", 1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"name": "NixlConnector"}, "transport 'x' cannot be made: .*NIXL is not available.*pip install nixl"),
        ({"name": "NoSuchConnector"}, r"names 'NoSuchConnector'; vLLM-Omni has \[.*'NixlConnector'"),
        ({"name": "OmniAutoConnector"}, "names 'OmniAutoConnector'; vLLM-Omni has"),
        ({"name": "NixlConnector", "mail": "pigeon"}, r"`mail: pigeon`; available are \['arena'\]"),
    ],
)
def test_what_cannot_be_made_is_said_with_the_fix(options: dict[str, Any], said: str) -> None:
    with arena() as open_mail, pytest.raises(ConfigError) as refused:
        foreign_ways({"x": ForeignOptions(**options)}, [Way(open_mail(), 0)], {"stage_id": 0})
    assert re.search(said, str(refused.value))


def test_a_transfer_engine_without_a_path_for_mail_is_refused() -> None:
    with pytest.raises(ConfigError, match="set `arena` or `mooncake`"):
        foreign_ways({"x": ForeignOptions(name="NixlConnector")}, [], {"stage_id": 0})


def test_auto_sends_by_the_path_that_an_edge_names() -> None:
    register()
    pool = {"initial_bytes": MIB, "max_bytes": 4 * MIB}
    extra = {
        "stage_id": 0,
        "arena": {"text": pool, "image": pool, "audio": pool},
        "foreign": {"shm": {"name": "SharedMemoryConnector", "distance": 0}},
        "edges": {"0->1": ["shm"]},
    }
    connector = OmniConnectorFactory.create_connector(ConnectorSpec("OmniAutoConnector", extra))
    try:
        for target in ("1", "2"):
            assert connector.put("0", target, "k", {"x": torch.arange(9)})[0]
            assert connector.get("0", target, "k")[0]["x"].tolist() == list(range(9))
        assert connector.health()["served"] == {"0->1 shm only": 1, "0->2 arena nearest": 1}
    finally:
        connector.close()


def test_auto_sends_within_the_host_once_the_stage_has_started_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each connector announces the stage that it was made for."""
    register()
    monkeypatch.setenv(ARENA_VARIABLE, "late-start")
    pool = {"initial_bytes": MIB, "max_bytes": 4 * MIB}
    extra = {
        "arena": {"text": pool, "image": pool, "audio": pool},
        "foreign": {"far": {"name": "SharedMemoryConnector", "distance": 1}},
    }
    first = OmniConnectorFactory.create_connector(ConnectorSpec("OmniAutoConnector", {"stage_id": 0, **extra}))
    second = None
    try:
        assert first.put("0", "1", "early", 1)[0]
        second = OmniConnectorFactory.create_connector(ConnectorSpec("OmniAutoConnector", {"stage_id": 1, **extra}))
        assert first.put("0", "1", "late", 2)[0]
        assert [second.get("0", "1", key)[0] for key in ("early", "late")] == [1, 2]
        assert first.health()["served"] == {"0->1 arena nearest": 1, "0->1 far only": 1}
    finally:
        first.close()
        if second is not None:
            second.close()
