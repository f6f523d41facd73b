"""`python -m tests.omni.harness.host_program SOCKET`: a program of a host, which takes its orders from a socket.

It enters the namespaces of its host. It then is the front end of a pipeline with its first stage, asked by
calls of the methods below, or a stage without a front end (``vllm serve --headless``).
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from typing import Any

from dev.fork_spawned import fork_what_is_spawned
from dev.omni_cpu.asking import Ask
from dev.omni_cpu.spec import PipelineSpec
from tests.omni.harness.stage_scenarios import ask_all, held, samples
from tests.support.hosts import enter
from tests.support.processes import obey

ANSWER_SECONDS = 150.0


class HostProgram:
    """A program of a host."""

    def enter(self, holder: int, log: str, environment: Mapping[str, str]) -> int:
        """Move to a host, with the output in a file; return the process id."""
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        enter(holder)
        fork_what_is_spawned()  # on this host
        os.environ.update(environment)
        return os.getpid()

    def stage(self, command: list[str]) -> None:
        """Be ``vllm serve`` with these arguments, until it ends."""
        from vllm_omni.entrypoints.cli.main import main

        sys.argv = ["vllm", "serve", *command]
        main()

    # ---- the front end

    def front_end(self, spec: Mapping[str, Any], model: str, deploy: str, how: Mapping[str, Any]) -> None:
        """Start the front end, which starts its own stage and waits for the others. ``how``: of `AsyncOmni`."""
        from vllm_omni.entrypoints.async_omni import AsyncOmni
        from vllm_omni.plugins import load_omni_general_plugins

        load_omni_general_plugins()
        self._spec = PipelineSpec(**spec)
        self._omni = AsyncOmni(model=model, deploy_config=deploy, **how)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._asked: dict[str, Future[Any]] = {}

    def ask(self, name: str, asks: Mapping[str, Ask]) -> None:
        """Ask all at a time, under names that begin with ``name``; `answers` returns what they answer."""
        self._asked[name] = self._run(ask_all(self._omni, self._spec, name, asks))

    def answers(self, name: str) -> dict[str, Any]:
        """Return the answers to `ask`."""
        found: dict[str, Any] = self._asked.pop(name).result(ANSWER_SECONDS)
        return found

    def is_answered(self, name: str) -> bool:
        """Return whether all of `ask` are answered."""
        return self._asked[name].done()

    def replicas(self) -> list[dict[int, str]]:
        """Return the host of each replica that serves, by stage and number; that of the front end is ''."""
        return [
            {
                number: pool.clients[number].client_addresses.get("replica_host", "")
                for number in pool.live_replica_ids()
            }
            for pool in self._omni.engine.stage_pools
        ]

    def running(self, stage_id: int) -> dict[int, int]:
        """Return how many requests each replica of a stage runs."""
        counts: dict[int, int] = {}
        for work in list(self._omni.engine.stage_pools[stage_id].queue.running.values()):
            counts[work.replica_id] = counts.get(work.replica_id, 0) + 1
        return counts

    def left(self) -> int:
        """Return how many requests wait or run anywhere."""
        return sum(held(pool) for pool in self._omni.engine.stage_pools)

    def metrics(self) -> list[list[Any]]:
        """Return the metrics of the stage scheduler: name, labels, value."""
        return [[name, labels, value] for name, labels, value in samples()]

    def close(self) -> None:
        """End the front end and its stage."""
        self._omni.shutdown()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)


if __name__ == "__main__":
    try:
        obey(sys.argv[1], HostProgram)
    finally:
        os._exit(0)
