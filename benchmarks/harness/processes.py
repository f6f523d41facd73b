"""The processes of one engine and what they use: client (this process), engine core, workers."""

from __future__ import annotations

import os
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
