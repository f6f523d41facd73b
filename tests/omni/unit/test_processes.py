"""The processes of replicas: which they are, what they hold, and how they end."""

from __future__ import annotations

import asyncio
import multiprocessing
import subprocess
import time
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import zmq
import zmq.asyncio

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from tests.support.descriptors import nothing_left_open, opened
from vllm_omni_sched.omni.stages.reports import processes

pytestmark = pytest.mark.omni


def test_processes_are_measured_and_ended() -> None:
    with subprocess.Popen(["sleep", "600"]) as sleeping:
        (found,) = processes.with_children([sleeping.pid, 2**22 + 12345])  # beyond what Linux gives
        assert found == psutil.Process(sleeping.pid)
        assert processes.host_bytes([found]) > 0
        processes.kill([psutil.Process(), found])  # never itself
        assert sleeping.wait(10) == -9
    assert processes.cpu_seconds([found]) is None
    assert processes.host_bytes([found]) == 0


def test_memory_is_measured_without_a_look_at_every_process_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop of the front end waits for it."""
    shell = ["bash", "-c", "sleep 600 & sleep 600 & echo started; wait"]
    with subprocess.Popen(shell, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "started\n"
        every = processes.with_children([parent.pid])
        with monkeypatch.context() as patched:
            patched.setattr(processes, "with_children", lambda pids: pytest.fail("it looks at every process"))
            found = processes.running_under([parent.pid, 2**22 + 12345])
        assert len(found) == 3
        assert set(found) == set(every)
        processes.kill(every)


def test_a_diffusion_client_has_one_process() -> None:
    client = SimpleNamespace(_proc_manager=SimpleNamespace(proc=SimpleNamespace(pid=7)))
    assert processes.pids_of(client) == [7]
    assert processes.pids_of(SimpleNamespace()) == []


class Client:
    """What vLLM's client holds of an engine, made as its constructor does, and shut down by vLLM's own code."""

    def __init__(self) -> None:
        from vllm.v1.engine.core_client import BackgroundResources

        context = zmq.Context(io_threads=2)
        shadow = zmq.asyncio.Context(context)
        process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
        process.start()
        manager = SimpleNamespace(processes=[process], shutdown=lambda timeout: None)
        self.resources: Any = BackgroundResources(ctx=context, engine_manager=manager)
        self.resources.input_socket = shadow.socket(zmq.ROUTER)
        self.resources.output_socket = shadow.socket(zmq.PULL)
        self.resources.output_queue_task = asyncio.get_running_loop().create_task(asyncio.sleep(600))

    def shutdown(self) -> None:
        self.resources()


def test_nothing_stays_open_of_an_engine_that_died() -> None:
    """Even if somebody still refers to its client."""

    async def one_death(kept: list[Client]) -> None:
        client = Client()
        kept.append(client)
        process = client.resources.engine_manager.processes[0]
        process.kill()
        process.join()
        del process
        client.shutdown()
        held = opened()
        processes.release_client(client)
        while client.resources.engine_manager is not None:
            await asyncio.sleep(0.01)
        assert held - opened()
        await asyncio.sleep(0)

    kept: list[Client] = []
    asyncio.run(one_death(kept))  # what is opened once, stays: the resource tracker
    with nothing_left_open():
        asyncio.run(one_death(kept))


def test_a_client_without_such_resources_is_let_be() -> None:
    processes.release_client(SimpleNamespace())
    processes.release_client(None)
