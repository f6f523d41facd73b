"""The processes of one engine and what they use: client (this process), engine core, workers."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Usage:
    cpu_seconds: float  # user and system, all threads, since the process started
    rss_bytes: int


class ProcessTree:
    """This process and its descendants under the names the engine gives them; helpers of Python's are left out."""

    def __init__(self) -> None:
        me = psutil.Process(os.getpid())
        self.processes: dict[str, psutil.Process] = {"client": me}
        for child in me.children(recursive=True):
            role = role_of(child)
            if role:
                self.processes[role if role not in self.processes else f"{role}-{child.pid}"] = child

    def roles(self) -> dict[str, int]:
        """Process id by role."""
        return {role: process.pid for role, process in self.processes.items()}

    def usage(self) -> dict[str, Usage]:
        seen = {}
        for role, process in self.processes.items():
            try:
                times, memory = process.cpu_times(), process.memory_info()
            except psutil.NoSuchProcess:
                continue
            seen[role] = Usage(times.user + times.system, memory.rss)
        return seen


class OtherProcesses:
    """The processor time, since it was made, of all processes but this one and its descendants."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._all, self._own = self._seconds()

    def share(self) -> float:
        """Return how many cores they had in the mean."""
        busy, own = self._seconds()
        return max(busy - self._all - (own - self._own), 0.0) / max(time.monotonic() - self._began, 1e-9)

    def _seconds(self) -> tuple[float, float]:
        machine = psutil.cpu_times()
        me = psutil.Process()
        own = 0.0
        for process in [me, *me.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                own += times.user + times.system
        return machine.user + machine.nice + machine.system + machine.irq + machine.softirq, own


def role_of(process: psutil.Process) -> str | None:
    """vLLM titles its processes `VLLM::EngineCore` and `VLLM::Worker…` (setproctitle); None for anything else."""
    try:
        title = " ".join(process.cmdline()) + " " + process.name()
    except psutil.Error:
        return None
    if "EngineCore" in title:
        return "engine core"
    if "Worker" in title:
        return "worker"
    return None
