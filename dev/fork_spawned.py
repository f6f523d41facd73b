"""Processes that multiprocessing would spawn are forked from a copy of the one that starts them."""

from __future__ import annotations

import os
import socket
from typing import Any


def fork_what_is_spawned() -> None:
    """Let multiprocessing fork what it would spawn from a copy of this process, as its own fork server does.

    The copy is made now: call it before threads are started. A process gets the environment of the one that starts it,
    at that moment, as if it were spawned. A further call makes a copy that takes the place of the first one, for a
    program that has moved to other namespaces.
    """
    from multiprocessing import forkserver, process

    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is None:
        _ask_copies()
    else:
        os.close(server._forkserver_alive_fd)  # the first copy ends
    process.current_process()._config["authkey"] = process.AuthenticationString(os.urandom(32))  # type: ignore[attr-defined]

    listener = socket.socket(socket.AF_UNIX)
    listener.bind("")  # an abstract address of the kernel's choice
    listener.listen()
    alive_r, alive_w = os.pipe()
    server._forkserver_address = listener.getsockname()
    if os.fork():
        server._forkserver_alive_fd = alive_w
        os.close(alive_r)
        listener.close()
        return
    os.close(alive_w)
    try:
        forkserver.main(listener.detach(), alive_r, [])
    finally:
        os._exit(0)


def _ask_copies() -> None:
    """Let multiprocessing ask the copy for what it would spawn."""
    from multiprocessing import context, forkserver, popen_forkserver, resource_tracker, spawn

    prepare, get_preparation_data = spawn.prepare, spawn.get_preparation_data

    def with_environment(name: str) -> dict[str, Any]:
        return {**get_preparation_data(name), "environment": dict(os.environ)}

    def prepare_environment(data: dict[str, Any]) -> None:
        os.environ.clear()
        os.environ.update(data.pop("environment"))
        choose_where_metrics_are()
        prepare(data)

    spawn.get_preparation_data, spawn.prepare = with_environment, prepare_environment  # type: ignore[assignment]
    server: Any = forkserver._forkserver
    server.ensure_running = resource_tracker.ensure_running
    spawned: Any = context.SpawnProcess
    spawned._Popen = staticmethod(popen_forkserver.Popen)


def choose_where_metrics_are() -> None:
    """Let prometheus_client keep values where the environment says: in memory, or in files that processes share.

    It chooses when it is imported. vLLM names the folder of these files before it spawns several API servers.
    """
    from prometheus_client import values

    values.ValueClass = values.get_value_class()  # type: ignore[no-untyped-call]
