"""Inspect the processes of replicas: their ids, memory and processor time, and their deaths."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from vllm.v1.engine.exceptions import EngineDeadError


class ReplicaDeadError(EngineDeadError):
    """The process behind a client has ended, or is to be treated as if it had.

    A report may come late, when another process has taken the place of this one. So it names the client.
    """

    def __init__(self, client: Any, why: str) -> None:
        super().__init__()
        self.client, self.why = client, why

    def __str__(self) -> str:
        return self.why


def pids_of(client: Any) -> list[int]:
    """Return the process ids of a replica's engine from its client; empty if it runs on another host."""
    return [process.pid for process in processes_of(client) if getattr(process, "pid", None) is not None]


def processes_of(client: Any) -> Iterator[Any]:
    """Yield the processes of an engine core, or of a diffusion engine, that this process has started."""
    manager = getattr(getattr(client, "resources", None), "engine_manager", None)
    yield from getattr(manager, "processes", None) or ()
    diffusion = getattr(getattr(client, "_proc_manager", None), "proc", None)
    if diffusion is not None:
        yield diffusion


def release_client(client: Any) -> None:
    """Free what this process holds of an engine that has ended, after its client was shut down.

    vLLM's client closes its sockets then, but keeps their context (two descriptors for each of its threads) and the
    handles of processes for as long as it is referenced.
    """
    resources = getattr(client, "resources", None)
    if resources is None:
        return

    context = getattr(resources, "ctx", None)

    def give_back() -> None:
        if context is not None:
            context.term()  # waits until the event loop that owns the sockets has closed them
        resources.engine_manager = None

    threading.Thread(target=give_back, name="omni-sched-release-client", daemon=True).start()


def running_under(pids: list[int]) -> list[psutil.Process]:
    """Return the live ones of these processes and their descendants, as the kernel lists them.

    It takes microseconds, while `with_children` reads the state of every process of the host, and the event loop of the
    front end waits. The kernel's lists may miss a child while another one ends: this is for measurements alone.
    """
    if not Path("/proc/thread-self/children").exists():  # a kernel without CONFIG_PROC_CHILDREN
        return with_children(pids)
    found: dict[int, psutil.Process] = {}
    waiting = list(pids)
    while waiting:
        pid = waiting.pop()
        with suppress(psutil.Error):
            found.setdefault(pid, psutil.Process(pid))
        for thread in Path(f"/proc/{pid}/task").glob("*"):
            with suppress(OSError):
                waiting += map(int, (thread / "children").read_bytes().split())
    return list(found.values())


def with_children(pids: list[int]) -> list[psutil.Process]:
    """Return the live ones of these processes and their descendants, each before its own descendants."""
    found: dict[int, psutil.Process] = {}
    for pid in pids:
        try:
            process = psutil.Process(pid)
            for one in (process, *process.children(recursive=True)):
                found.setdefault(one.pid, one)
        except psutil.Error:
            continue
    return list(found.values())


def host_bytes(processes: list[psutil.Process]) -> int:
    """Return the resident memory in bytes; memory that several processes share counts for each."""
    held = 0
    for process in processes:
        try:
            held += process.memory_info().rss
        except psutil.Error:
            continue
    return held


def cpu_seconds(processes: list[psutil.Process]) -> float | None:
    """Return the processor time used; None while one is running or waits for a disk, or cannot be inspected."""
    used = 0.0
    for process in processes:
        try:
            with process.oneshot():
                if process.status() in (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP):
                    return None
                times = process.cpu_times()
        except psutil.Error:
            return None
        used += times.user + times.system
    return used


def any_stopped(processes: list[psutil.Process]) -> bool:
    """Return whether a signal or a debugger has stopped one of the processes."""
    for process in processes:
        try:
            if process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                return True
        except psutil.Error:
            continue
    return False


def kill(processes: list[psutil.Process]) -> None:
    """Kill the processes, even stopped ones."""
    for process in processes:
        try:
            if process.pid != os.getpid():
                process.send_signal(signal.SIGKILL)
        except psutil.Error:
            continue
