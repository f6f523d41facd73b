"""Replicas on other hosts that go silent, are heard again, or join, as the membership controller of vLLM-Omni says."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory
from vllm_omni.distributed.omni_coordinator import ReplicaInfo, ReplicaList, ReplicaStatus
from vllm_omni.distributed.omni_coordinator.messages import ReplicaEvent

from tests.support.omni_moves import at
from tests.support.omni_stages import Rig, StageSpec
from vllm_omni_sched.omni import heartbeat
from vllm_omni_sched.omni.stages.payloads import Payloads

pytestmark = [pytest.mark.omni, pytest.mark.asyncio]

TWO = StageSpec(replicas=2, final_output=True)
FED = StageSpec(replicas=2, final_output=True, edge=True)
FRONT, OTHER, THIRD = "10.0.0.1", "10.0.0.2", "10.0.0.3"


class HostsRig(Rig):
    """A rig in which the second replica of the last stage is on another host; more can join."""

    async def __aenter__(self) -> HostsRig:
        self.where = {1: OTHER}
        self.master = SimpleNamespace(address=FRONT, get_replica_host=self._host)
        await super().__aenter__()
        self.last = self.omni.stage_pools[-1]
        self.up: set[str] = set()
        self.last._hub = SimpleNamespace(get_replicas_for_stage=self._reported)
        for replica_id, client in enumerate(self.last.clients):
            client.client_addresses = {"input_address": address(replica_id)}
            self.last.add_client(address(replica_id), client, replica_id=replica_id)
            self.up.add(address(replica_id))
        await self.settle()
        return self

    def _host(self, stage_id: int, replica_id: int) -> str:
        return self.where.get(replica_id, FRONT) if stage_id == len(self.stages) - 1 else FRONT

    def _reported(self, stage_id: int) -> ReplicaList:
        replicas = [ReplicaInfo(one, one, stage_id, ReplicaStatus.UP, 0, 0.0, 0.0) for one in sorted(self.up)]
        return ReplicaList(replicas=replicas, timestamp=0.0)

    async def silent(self, replica_id: int) -> Any:
        """Let the coordinator miss a replica; return what vLLM-Omni is left to close."""
        self.up.discard(address(replica_id))
        left = self.last.remove_client(address(replica_id))
        await self.settle()
        return left

    async def heard(self, replica_id: int) -> None:
        """Let the coordinator report a replica again."""
        self.up.add(address(replica_id))
        self.omni.absent.check(self.now)
        await self.settle()

    async def join(self, replica_id: int, host: str) -> None:
        """Let a host start a replica."""
        self.where[replica_id] = host
        client = self.runtime._make(self.last.stage_id)
        client.client_addresses = {"input_address": address(replica_id)}
        self.up.add(address(replica_id))
        self.last.add_client(address(replica_id), client, replica_id=replica_id)
        await self.settle()


def address(replica_id: int) -> str:
    return f"tcp://{FRONT}:{7000 + replica_id}"


async def on_the_other_host(rig: HostsRig, *names: str) -> list[str]:
    """Ask, and return the requests that run on the other host."""
    for number, name in enumerate(names):
        await rig.ask(name, (number + 1, 7))
    for stage_id in range(len(rig.stages) - 1):
        await rig.finish(stage_id, *rig.at(stage_id))
    stage_id = rig.last.stage_id
    return [name for name in names if rig.replica_id(stage_id, name) == 1]


async def test_requests_of_a_silent_host_run_elsewhere_and_their_client_hears_nothing_twice() -> None:
    async with HostsRig(TWO) as rig:
        there = await on_the_other_host(rig, "a", "b")
        assert len(there) == 1
        await rig.step(0, *there)
        client = rig.replica(0, 1)
        assert await rig.silent(1) is None
        assert rig.runtime.started == []  # its host starts it again
        assert not client.down
        await rig.finish(0, *list(rig.at(0)))
        assert rig.answer("a") == rig.expected((1, 7))
        assert rig.answer("b") == rig.expected((2, 7))


async def test_a_host_that_is_heard_again_serves_again_and_what_it_still_says_does_not_count() -> None:
    async with HostsRig(TWO) as rig:
        (name,) = await on_the_other_host(rig, "a", "b")
        client = rig.replica(0, 1)
        await rig.silent(1)
        client.finish(name)  # it went on
        await rig.heard(1)
        assert rig.replica(0, 1) is client
        assert client.aborted == [name]
        assert rig.told(name) == []
        await rig.finish(0, *list(rig.at(0)))
        for one, tokens in (("a", (1, 7)), ("b", (2, 7))):
            assert rig.answer(one) == rig.expected(tokens)
        assert await on_the_other_host(rig, "c", "d")
        await rig.finish(0, *list(rig.at(0)))
        assert not rig.left_over()


async def test_one_that_is_heard_again_before_it_is_known_what_was_lost_serves_after_that() -> None:
    async with HostsRig(StageSpec(), FED) as rig:
        (name,) = await on_the_other_host(rig, "a", "b")
        rig.last.remove_client(address(1))
        rig.omni.absent.check(rig.now)  # the coordinator reports it all the same
        await rig.settle()
        assert rig.omni.recovery.serves(at(1, 1))
        await rig.finish_all()
        assert rig.answer(name) == rig.expected((1, 7) if name == "a" else (2, 7))
        await on_the_other_host(rig, "c", "d")
        assert {rig.replica_id(1, one) for one in "cd"} == {0, 1}


async def test_a_payload_that_a_silent_host_has_not_received_goes_to_the_next_one() -> None:
    async with HostsRig(StageSpec(), FED) as rig:
        (name,) = await on_the_other_host(rig, "a", "b")
        await rig.silent(1)
        assert [one.partition("~")[0] for one in rig.at(0)] == []  # the first stage does not run again
        await rig.finish(1, *list(rig.at(1)))
        assert rig.answer(name) == rig.expected((1, 7) if name == "a" else (2, 7))


async def test_without_recovery_the_requests_of_a_silent_host_fail() -> None:
    async with HostsRig(TWO, runtime={"recovery": {"enabled": False}}) as rig:
        (name,) = await on_the_other_host(rig, "a", "b")
        client = rig.replica(0, 1)
        await rig.silent(1)
        assert "no heartbeat" in rig.error(name)
        assert client.down
        await rig.finish(0, *list(rig.at(0)))
        assert len(rig.messages) >= 2


async def test_the_replica_that_the_core_has_chosen_is_used_though_vllm_omni_has_a_balancer() -> None:
    async with HostsRig(TWO) as rig:
        rig.last._lb = SimpleNamespace(select=lambda task, replicas: 0)  # always the other host
        for number in range(4):
            await rig.ask(str(number), (number,))
        works = rig.omni.stage_pools[0].queue.running
        assert {work.replica_id for work in works.values()} == {0, 1}
        for name, work in works.items():
            assert rig.replica_id(0, name) == work.replica_id


async def test_the_host_of_the_front_end_is_here() -> None:
    async with HostsRig(TWO) as rig:
        assert rig.last.hosts() == {1: OTHER}
        rig.where[1] = FRONT
        assert rig.last.hosts() == {}


@pytest.fixture
def coordinator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """vLLM-Omni's coordinator with a time-out of a second; the test does what its threads do."""
    kind = sys.modules[heartbeat.COORDINATOR].OmniCoordinator
    monkeypatch.setattr(kind, "_handle_event", kind._handle_event)  # puts back what was there
    for thread in ("_periodic_loop", "_recv_loop"):
        monkeypatch.setattr(kind, thread, lambda self: None)
    monkeypatch.setenv(heartbeat.VARIABLE, "0.25")
    heartbeat.hook_coordinator()
    one = kind("inproc://router", "inproc://pub", heartbeat_timeout=1.0)
    yield one
    one.close()


def says(coordinator: Any, name: str, what: str) -> None:
    coordinator._handle_event(ReplicaEvent(name, name, 1, what, ReplicaStatus.UP, None))


async def test_a_silent_replica_is_noticed_with_the_next_heartbeat_of_another(coordinator: Any) -> None:
    for name in ("one", "other"):
        says(coordinator, name, "update")
    known = coordinator._replicas
    says(coordinator, "other", "heartbeat")
    assert known["one"].status == ReplicaStatus.UP
    known["one"].last_heartbeat -= 1.5
    says(coordinator, "other", "heartbeat")
    assert known["one"].status == ReplicaStatus.ERROR
    assert coordinator._pending_broadcast
    says(coordinator, "one", "heartbeat")
    assert known["one"].status == ReplicaStatus.UP


async def test_a_replica_whose_heartbeat_is_not_read_yet_is_not_silent(
    coordinator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "other"):
        says(coordinator, name, "update")
    coordinator._replicas["one"].last_heartbeat -= 1.5
    monkeypatch.setattr(coordinator, "_router", SimpleNamespace(poll=lambda _: 1, close=coordinator._router.close))
    says(coordinator, "other", "heartbeat")
    assert coordinator._replicas["one"].status == ReplicaStatus.UP


async def test_the_front_end_does_not_announce_the_stages_whose_payloads_it_takes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else senders on its host would take the stages for present, and send payloads where they are not."""
    made: list[Any] = []

    def create_connector(spec: Any) -> Any:
        made.append(spec)
        return SimpleNamespace(get=lambda *_: None, close=lambda: None)

    monkeypatch.setattr(OmniConnectorFactory, "create_connector", create_connector)
    config = {"name": "OmniAutoConnector", "extra": {"stage_id": 1, "replicas": {"1": 7}}}
    stage_config = SimpleNamespace(model_config=SimpleNamespace(stage_connector_config=config))
    payloads = Payloads(lambda name: name)
    assert payloads.take(SimpleNamespace(stage_id=1, stage_vllm_config=stage_config), "a") is None  # type: ignore[arg-type]
    assert [(spec.name, spec.extra) for spec in made] == [("OmniAutoConnector", {"stage_id": -1, "replicas": {"1": 7}})]
    assert config["extra"]["stage_id"] == 1
