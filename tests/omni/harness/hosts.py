"""A pipeline on several hosts: the front end with the first stage on one, a replica of the second on each other."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from dev.omni_cpu.deploy import write_deploy
from dev.omni_cpu.spec import PipelineSpec
from tests.omni.connectors import ARENA
from tests.omni.harness.processes import omni_environment, start_warm
from tests.support.hosts import Host, Network, mooncake_master
from tests.support.processes import Process, begin

PORT = 26000
MASTER_PORT = 50051
START_SECONDS = 180.0
UNTIL_SECONDS = 90.0
PROGRAM = "tests.omni.harness.host_program"
HEARTBEAT = {"VLLM_OMNI_SCHED_HEARTBEAT_SECONDS": "0.25"}
ENVIRONMENT = HEARTBEAT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


class Hosts:
    """Starts the programs of a pipeline on hosts; a context manager that leaves nothing running.

    Args:
        spec: the pipeline, without its connector.
        mooncake: whether payloads cross hosts in a Mooncake store; its master runs on the host of the front end.
        how: further arguments of the front end (`AsyncOmni`).
    """

    def __init__(self, spec: PipelineSpec, model: Path, folder: Path, mooncake: bool = False, **how: Any) -> None:
        self._spec, self._model, self._folder, self._mooncake, self._how = spec, model, folder, mooncake, how
        self._stack = ExitStack()
        self._logs = 0

    def __enter__(self) -> Hosts:
        self.network = self._stack.enter_context(Network())
        self.first = self.network.host()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # ---- programs

    def start_front_end(self) -> None:
        """Begin to start the front end; `wait_for_front_end` returns when it and its stages are ready."""
        host = self.first
        if self._mooncake:
            host.start(mooncake_master(host, MASTER_PORT))
        self.front_end = self._program(host, "front-end")
        self.front_end.begin(
            "front_end", self._spec.to_json(), str(self._model), str(self._deploy(host)), self._front_end_options()
        )

    def _front_end_options(self) -> dict[str, Any]:
        return {
            "stage_id": 0,
            "omni_master_address": self.first.address,
            "omni_master_port": PORT,
            "stage_init_timeout": int(START_SECONDS),
            "init_timeout": int(START_SECONDS),
            **self._how,
        }

    def wait_for_front_end(self) -> None:
        self.front_end.result(START_SECONDS)

    def start_stage(self, host: Host, stage_id: int = 1) -> Process:
        """Begin to start a replica of a stage on a host, as an operator does with ``vllm serve``."""
        program = self._program(host, f"stage-{stage_id}-on-{host.address}")
        place = ["--omni-master-address", self.first.address, "--omni-master-port", str(PORT)]
        options = ["--omni", "--headless", "--stage-id", str(stage_id), "--deploy-config", str(self._deploy(host))]
        program.begin("stage", [str(self._model), *options, *place])
        return program

    def _program(self, host: Host, name: str) -> Process:
        self._logs += 1
        program = begin(self._start)
        self._stack.callback(program.end)
        program.enter(host.pid, str(self._folder / f"{self._logs}-{name}.log"), {"VLLM_HOST_IP": host.address})
        return program

    def _start(self, name: str) -> int:
        command, environment = [sys.executable, "-m", PROGRAM, name], omni_environment() | ENVIRONMENT
        with open(os.devnull, "wb") as nowhere:
            program = start_warm(command, stdout=nowhere, env={**os.environ, **environment})
        self._stack.callback(program.wait)
        return program.pid

    def _deploy(self, host: Host) -> Path:
        """Write the deploy YAML of a host: they differ in the address that others reach it at."""
        extra: dict[str, Any] = {"arena": {**ARENA, "arena": "hosts"}}
        if self._mooncake:
            extra["mooncake"] = {
                "host": host.address,
                "master": f"{self.first.address}:{MASTER_PORT}",
                "proto": "tcp",
                "segment": 64 << 20,
                "localbuf": 16 << 20,
            }
        spec = replace(self._spec, connector="OmniAutoConnector", extra=extra)
        return write_deploy(spec, self._folder / f"deploy-{host.address}.yaml")

    # ---- what tests ask

    def answers(self, name: str, asks: Mapping[str, Any]) -> dict[str, Any]:
        """Ask all at a time, and return the answers."""
        self.front_end.ask(name, asks)
        return self.answers_of(name)

    def answers_of(self, name: str) -> dict[str, Any]:
        """Return the answers to what was asked before."""
        self.front_end.begin("answers", name)
        found: dict[str, Any] = self.front_end.result(UNTIL_SECONDS * 2)
        return found

    def until(self, condition: Callable[[], Any], seconds: float = UNTIL_SECONDS) -> float:
        """Wait until a condition holds; return how long that took."""
        began = time.monotonic()
        while not condition():
            assert time.monotonic() < began + seconds, f"it did not happen; logs are in {self._folder}"
            time.sleep(0.02)
        return time.monotonic() - began

    def total(self, metric: str, **labels: str) -> float:
        """Return the sum of a metric over all series with these labels."""
        found = self.front_end.metrics()
        return sum(value for name, of, value in found if name == metric and labels.items() <= of.items())

    def logs(self) -> str:
        """Return the ends of all logs, for the message of a failure."""
        files = sorted(self._folder.glob("*.log"))
        return "\n".join(f"== {file.name}\n{file.read_text()[-4000:]}" for file in files)
