"""Our connectors by the names that a stage config uses, through vLLM-Omni's own factory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from pydantic import BaseModel
from vllm_omni.distributed.omni_connectors.connectors.shm_connector import SharedMemoryConnector
from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory
from vllm_omni.distributed.omni_connectors.utils.config import ConnectorSpec

from tests.support.mooncake import why_not
from tests.support.scripted_transport import ScriptedTransport
from vllm_omni_sched.clock import monotonic_seconds
from vllm_omni_sched.connectors.arena import ArenaOptions
from vllm_omni_sched.connectors.arena.meeting import ARENA_VARIABLE
from vllm_omni_sched.connectors.auto import AutoOptions
from vllm_omni_sched.connectors.cuda_ipc import CudaIpcOptions
from vllm_omni_sched.connectors.extra import read_extra
from vllm_omni_sched.connectors.mooncake import MooncakeOptions
from vllm_omni_sched.connectors.watch import WatchOptions
from vllm_omni_sched.omni.connector import TransportConnector
from vllm_omni_sched.plugin import register

pytestmark = pytest.mark.omni

SMALL = {"initial_bytes": 1 << 20, "max_bytes": 4 << 20}
EXTRAS: dict[str, dict[str, Any]] = {
    "SharedMemoryConnector": {},
    "ArenaConnector": {"text": SMALL, "image": SMALL, "audio": SMALL, "put_timeout_seconds": 0},
    "CudaIpcConnector": {
        "arena": {"text": SMALL, "image": SMALL, "audio": SMALL, "put_timeout_seconds": 0},
        "max_held_bytes": 1 << 20,
    },
    "OmniAutoConnector": {"arena": {"text": SMALL, "image": SMALL, "audio": SMALL}, "put_timeout_seconds": 0},
}
OURS = [name for name in EXTRAS if name != "SharedMemoryConnector"]


def make(name: str, **extra: Any) -> Any:
    register()
    return OmniConnectorFactory.create_connector(ConnectorSpec(name, {"stage_id": 1, **EXTRAS[name], **extra}))


@pytest.fixture(params=EXTRAS)
def connector(request: pytest.FixtureRequest) -> Iterator[Any]:
    made = make(request.param)
    yield made
    made.close()


def test_what_is_put_is_got_once_by_key_alone(connector: Any) -> None:
    sent, nbytes, _ = connector.put("0", "1", "r-1_0_0", {"t": torch.arange(10), "n": 3})
    assert (sent, nbytes > 80) == (True, True)
    payload, size = connector.get("0", "1", "r-1_0_0")
    assert size > 80
    assert payload["n"] == 3
    assert torch.equal(payload["t"], torch.arange(10))
    assert connector.get("0", "1", "r-1_0_0") is None


def test_what_was_never_put_is_waited_for_until_the_deadline(connector: Any) -> None:
    assert connector.get_with_deadline("0", "1", "never", deadline=monotonic_seconds() + 0.01) is None
    connector.put("0", "1", "now", {"x": 1})
    assert connector.get_with_deadline("0", "1", "now", deadline=monotonic_seconds() + 5)[0] == {"x": 1}


def test_cleanup_takes_back_exactly_the_key(connector: Any) -> None:
    for key in ("r-1_0_0", "r-1_0_1"):
        connector.put("0", "1", key, {"x": 1})
    connector.cleanup("r-1_0_0")
    assert connector.get("0", "1", "r-1_0_0") is None
    assert connector.get("0", "1", "r-1_0_1")[0] == {"x": 1}


def test_it_says_what_vllm_omni_reads(connector: Any) -> None:
    assert connector.stage_id == 1
    assert isinstance(connector, SharedMemoryConnector), "else nobody cleans up after an abort"
    assert connector.health()["status"] == "healthy"
    connector.reap_consumed()
    connector.abandon_get("any")


@pytest.mark.parametrize("name", OURS)
def test_the_same_key_on_two_edges_is_two_messages(name: str) -> None:
    connector = make(name)
    connector.put("0", "1", "k", {"edge": "01"})
    connector.put("1", "2", "k", {"edge": "12"})
    assert connector.get("1", "2", "k")[0] == {"edge": "12"}
    assert connector.get("0", "1", "k")[0] == {"edge": "01"}
    connector.close()


@pytest.mark.parametrize("name", OURS)
def test_what_does_not_get_through_is_said_so_vllm_omni_can_fail_the_request(name: str) -> None:
    connector = make(name)
    assert connector.put("0", "1", "k", {"x": object()}) == (False, 0, None)
    assert connector.put("0", "1", "k", {"x": torch.zeros(8 << 20)}) == (False, 0, None)
    facts = connector.health()
    assert facts.get("arena", facts)["refused"] == 1
    connector.close()


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"ring_byte": 1}, "did you mean 'extra.ring_bytes'"),
        ({"image": {"max_bytes": 1}}, "'extra.image.max_bytes'"),
        ({"growth_factor": "big"}, "'extra.growth_factor'"),
        ({"stall_second": 1}, "did you mean 'extra.stall_seconds'"),
        ({"leak_seconds": 0}, "'extra.leak_seconds'"),
        ({"arena": "a/b"}, "'extra.arena'"),
        ({"directory": "/nonexistent"}, "/nonexistent"),
    ],
)
def test_a_bad_option_is_named(extra: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make("ArenaConnector", **extra)


def test_a_path_between_hosts_without_a_master_is_refused_within_its_time() -> None:
    if reason := why_not():
        pytest.skip(reason)
    extra = {"master": "127.0.0.1:1", "connect_timeout_seconds": 0.2, "segment": "16MB", "localbuf": "16MB"}
    with pytest.raises(ValueError, match=r"127\.0\.0\.1:1"):
        OmniConnectorFactory.create_connector(ConnectorSpec("MooncakePoolConnector", extra))
    with pytest.raises(ValueError, match=r"127\.0\.0\.1:1"):
        make("OmniAutoConnector", mooncake=extra)


def test_a_bad_option_of_mooncake_is_named() -> None:
    with pytest.raises(ValueError, match=r"'extra\.segment'"):
        OmniConnectorFactory.create_connector(ConnectorSpec("MooncakePoolConnector", {"segment": "much"}))


def test_a_bad_option_of_device_memory_is_named() -> None:
    for extra, said in (
        ({"min_byte": 1}, "did you mean 'extra.min_bytes'"),
        ({"max_held_bytes": -1}, "'extra.max_held_bytes'"),
        ({"arena": {"ring_bytes": 1}}, "'extra.arena.ring_bytes'"),
    ):
        with pytest.raises(ValueError, match=said):
            OmniConnectorFactory.create_connector(ConnectorSpec("CudaIpcConnector", extra))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_device_tensors_without_a_device_go_through_the_arena_and_health_says_so() -> None:
    connector = make("CudaIpcConnector")
    connector.put("0", "1", "k", {"x": torch.ones(100)})
    assert connector.get("0", "1", "k")[0]["x"].sum() == 100
    health = connector.health()
    assert health["status"] == "healthy"
    assert health["reason"].startswith("no CUDA device")
    connector.close()


def test_the_composite_has_device_memory_in_place_of_the_arena() -> None:
    connector = make("OmniAutoConnector", cuda_ipc={"min_bytes": 1000})
    connector.put("0", "1", "k", {"x": torch.ones(100)})
    assert connector.get("0", "1", "k")[0]["x"].sum() == 100
    assert connector.health()["served"] == {"0->1 cuda_ipc only": 1}
    connector.close()
    with pytest.raises(ValueError, match="needs the arena"):
        make("OmniAutoConnector", arena=None, cuda_ipc={})


@pytest.mark.parametrize(
    "options", [ArenaOptions, AutoOptions, CudaIpcOptions, MooncakeOptions], ids=lambda o: o.__name__
)
def test_every_option_is_taken(options: type[BaseModel]) -> None:
    """Also beside those of the watch, which are in the same place."""
    defaults = {name: field.get_default(call_default_factory=True) for name, field in options.model_fields.items()}
    extra = {**defaults, "stall_seconds": 1.5, "leak_seconds": 2.5}
    read_extra(options, extra)
    connector = TransportConnector({"stage_id": 0, **extra}, lambda: ScriptedTransport("scripted", [0.0]), 1.0)
    assert connector.watch.options == WatchOptions(stall_seconds=1.5, leak_seconds=2.5)


def test_options_of_models_stay_theirs() -> None:
    connector = make("ArenaConnector", codec_chunk_frames=25, codec_left_context_frames=2)
    assert connector.config["codec_chunk_frames"] == 25
    connector.close()


def test_stages_that_could_not_meet_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    monkeypatch.delenv(ARENA_VARIABLE)
    with pytest.raises(ValueError, match="Set the option `arena`"):
        OmniConnectorFactory.create_connector(ConnectorSpec("ArenaConnector", {"stage_id": 1}))


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    connector = make("ArenaConnector", directory=str(tmp_path))
    connector.put("0", "1", "k", {"x": torch.zeros(100_000)})
    connector.get("0", "1", "k")
    connector.close()
    assert [*tmp_path.rglob("*")] == []
