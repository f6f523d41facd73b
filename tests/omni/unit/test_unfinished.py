"""Senders that are killed while they put a message into vLLM-Omni's shared memory: nothing of it stays."""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import uuid
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from vllm_omni.distributed.omni_connectors.connectors import shm_connector
from vllm_omni.distributed.omni_connectors.connectors.shm_connector import SharedMemoryConnector

from tests.support.omni_stages import Rig, StageSpec
from vllm_omni_sched.omni.branch_connector import OmniBranchConnector
from vllm_omni_sched.omni.stages.branches.payloads import EdgePayloads
from vllm_omni_sched.omni.stages.payloads import Payloads
from vllm_omni_sched.omni.unfinished import remove_left, remove_unfinished

pytestmark = pytest.mark.omni

SHM = Path("/dev/shm")
BRANCHES = {"connector": "SharedMemoryConnector", "extra": {}, "edges": [(0, 1), (0, 2)]}
DEATHS = {
    "with its lock file": (fcntl, "flock"),
    "with a segment that has no size": (os, "ftruncate"),
    "with an empty segment": (mmap, "mmap"),
    "with a segment that nobody has unlocked": (shm_connector.SharedMemoryConnector, "serialize_obj"),
}
"""By what is left: the call in which `put` dies. The last one dies when it has written the segment."""


@pytest.fixture
def request_id() -> Iterator[str]:
    name = f"unfinished-{uuid.uuid4().hex[:8]}"
    yield name
    for file in left(name):
        (SHM / file).unlink()


def left(request_id: str) -> list[str]:
    return sorted(file.name for file in SHM.iterdir() if request_id in file.name)


def in_a_killed_process(work: Callable[[], Any]) -> None:
    """Run work in a forked process that has to kill itself."""
    resource_tracker.ensure_running()  # else that of the child removes what it leaves
    pid = os.fork()
    if not pid:
        try:
            work()
        finally:
            os._exit(1)  # it was not killed
    _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL


def put_and_die(connector: Any, to_stage: str, key: str, at: tuple[Any, str]) -> None:
    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    where, name = at
    if name == "serialize_obj":
        where, name = shm_connector, "shm_write_bytes"
        written = shm_connector.shm_write_bytes
        setattr(where, name, lambda *args, **how: die(written(*args, **how)))
    else:
        setattr(where, name, die)
    connector.put("0", to_stage, key, {"ids": [1, 2, 3]})


def pool(stage_id: int, name: str, **extra: Any) -> Any:
    config = {"name": name, "extra": extra}
    return SimpleNamespace(
        stage_id=stage_id,
        stage_vllm_config=SimpleNamespace(model_config=SimpleNamespace(stage_connector_config=config)),
    )


@pytest.mark.parametrize("death", DEATHS)
@pytest.mark.parametrize("sent", [0, 2])
def test_nothing_stays_of_the_pieces_of_a_killed_sender(request_id: str, death: str, sent: int) -> None:
    connector = SharedMemoryConnector({"stage_id": 0})
    for piece in range(sent):
        assert connector.put("0", "1", f"{request_id}_0_{piece}", {"ids": [piece]})[0]
    other = f"{request_id}-other_0_0"
    assert connector.put("0", "1", other, {"ids": [0]})[0]
    in_a_killed_process(lambda: put_and_die(connector, "1", f"{request_id}_0_{sent}", DEATHS[death]))
    assert len(left(f"{request_id}_0_{sent}")) >= 1
    payloads = Payloads(lambda name: name)
    payloads.discard(pool(1, "SharedMemoryConnector"), [request_id], 8)
    assert left(request_id) == sorted([other, f"shm_{other}_lockfile.lock"])
    assert connector.get("0", "1", other) is not None


@pytest.mark.parametrize("death", DEATHS)
def test_nothing_stays_of_them_where_stages_branch(request_id: str, death: str) -> None:
    connector = OmniBranchConnector(BRANCHES)
    in_a_killed_process(lambda: put_and_die(connector, "2", f"{request_id}_0_0", DEATHS[death]))
    assert len(left(request_id)) >= 1
    EdgePayloads([pool(0, ""), pool(1, ""), pool(2, "OmniBranchConnector", **BRANCHES)]).discard_chunks(
        (0, 2), [request_id], 3
    )
    assert left(request_id) == []


def test_only_what_lies_in_shared_memory_is_removed(request_id: str, tmp_path: Path) -> None:
    file = tmp_path / request_id
    file.touch()
    connector = SharedMemoryConnector({"stage_id": 0})
    assert not remove_unfinished(connector, "0", "1", f"..{file}")
    assert file.exists()
    (SHM / request_id).touch()
    assert not remove_unfinished(SimpleNamespace(), "0", "1", request_id)
    assert remove_unfinished(connector, "0", "1", request_id)
    assert not remove_unfinished(connector, "0", "1", request_id)


@pytest.mark.asyncio
async def test_a_payload_of_a_run_that_is_over_does_not_stay() -> None:
    """Let the item arrive when the search for it is over."""
    async with Rig(StageSpec(replicas=2), StageSpec(final_output=True, edge=True)) as rig:
        await rig.ask("a")
        at = rig.replica_id(0, "a")
        await rig.finish(0, "a")
        payload = rig.edges.lying.pop("a_0_0")
        await rig.kill(0, at)
        rig.edges.lying["a_0_0"] = payload
        while any(rig.at(stage_id) for stage_id in range(2)):
            await rig.finish_all()
        assert rig.answer("a") == rig.expected()
        assert not rig.edges.lying
        assert not rig.left_over()


# ---- requests that left early


def test_what_requests_have_left_is_removed_and_what_is_of_others_stays(request_id: str) -> None:
    sender = SharedMemoryConnector({})
    keys = [f"{request_id}_0_0", f"{request_id}_1_17", f"{request_id}~3@2_0_1", f"{request_id}@1_0_0"]
    others = [f"{request_id}x_0_0", f"{request_id}-2@1_0_0"]
    for key in (*keys, *others):
        sender.put("0", "1", key, [1, 2])
    (SHM / keys[0]).unlink()  # as Python does when the process ends that made it
    resource_tracker.unregister(f"/{keys[0]}", "shared_memory")
    assert remove_left({request_id}) == len(keys)
    assert left(request_id) == sorted([*others, *(f"shm_{key}_lockfile.lock" for key in others)])
    assert remove_left({f"{request_id}x", f"{request_id}-2"}) == len(others)


@pytest.mark.asyncio
async def test_when_the_pipeline_ends_nothing_is_left_of_a_request_that_was_aborted(request_id: str) -> None:
    async with Rig(StageSpec(), StageSpec(final_output=True)) as rig:
        await rig.ask(request_id)
        await rig.abort(request_id)
        sender = SharedMemoryConnector({})  # one that is collected takes back what it has sent
        sender.put("0", "1", f"{request_id}_0_0", [1, 2])  # the stage was about to send it
        assert left(request_id)
        rig.omni._shutdown_stages()
        assert left(request_id) == []
