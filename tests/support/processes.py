"""Processes that do as they are told, and can be killed at an exact point.

They are forked, in milliseconds, from one that has imported what its actor needs and nothing else. That one is a
program that calls `serve`: a line on its standard input names the socket on which the next process takes its orders.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path as FilePath
from typing import Any

from tests.support.arena import LONG
from vllm_omni_sched.clock import sleep_seconds
from vllm_omni_sched.connectors.arena import ArenaOptions


class Died(Exception):
    """Raised when the process ended before it answered."""


class Process:
    """Handle of a process that runs the methods of its actor on request."""

    def __init__(self, pid: int, orders: Connection) -> None:
        self.pid, self._orders = pid, orders
        try:
            self._end: int | None = os.pidfd_open(pid)
        except ProcessLookupError:
            self._end = None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self._call(name, args, kwargs)

    def _call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            self._orders.send((name, args, kwargs))
            assert self._orders.poll(LONG), f"{name} did not end"
            said, result = self._orders.recv()
        except (EOFError, ConnectionError) as error:
            self.wait()
            raise Died(name) from error
        if said == "raised":
            raise result
        return result

    def dies(self, name: str, *args: Any) -> None:
        """Do something that kills it."""
        try:
            result = self._call(name, args, {})
        except Died:
            return
        raise AssertionError(f"{name} lived, and said {result}")

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.wait()

    def end(self) -> None:
        """Kill it, unless it has been waited for."""
        if self._end is not None:
            self.kill()

    def begin(self, name: str, *args: Any) -> None:
        """Something, and do not wait for it."""
        self._orders.send((name, args, {}))

    def result(self, seconds: float = LONG) -> Any:
        """Return the result of the order under way, which takes at most so long."""
        assert self._orders.poll(seconds), "the order did not end"
        said, result = self._orders.recv()
        if said == "raised":
            raise result
        return result

    def stops(self, name: str, *args: Any) -> None:
        """Begin something at an exact point of which it stops."""
        self.begin(name, *args)
        for _ in range(10_000):
            if FilePath(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
                return
            sleep_seconds(0.001)
        raise AssertionError(f"{name} did not stop")

    def goes_on(self) -> Any:
        """Continue a stopped process and return the result of its order."""
        os.kill(self.pid, signal.SIGCONT)
        return self.result()

    def wait(self) -> None:
        """Until it has ended, and the kernel has taken back what it held."""
        if self._end is not None:
            assert select.select([self._end], [], [], LONG)[0], "it did not end"
            os.close(self._end)
            self._end = None
        self._orders.close()


def begin(start: Callable[[str], int]) -> Process:
    """Start a process that obeys.

    Args:
        start: starts it with the name of the socket on which it takes its orders, and returns its id.
    """
    name = f"vos-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen(1)
        listener.settimeout(LONG)
        pid = start(name)
        connection, _ = listener.accept()
        connection.setblocking(True)
    return Process(pid, Connection(connection.detach()))


class Processes:
    """Starts processes, and ends those that are left.

    Args:
        module: the program that forks them; it calls `serve`.
        more: further variables of its environment.
    """

    def __init__(self, module: str, more: Mapping[str, str] | None = None) -> None:
        root = FilePath(__file__).parents[2]
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
        self._server = subprocess.Popen(
            [sys.executable, "-m", module],
            cwd=root,
            env={**environment, **(more or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._started: list[Process] = []

    def start(self) -> Process:
        process = begin(self._fork)
        self._started.append(process)
        return process

    def _fork(self, name: str) -> int:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(f"{name}\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())

    def open(self, options: ArenaOptions, ahead: float = 0.0) -> Process:
        """Start a process with a transport."""
        process = self.start()
        process.open(options.model_dump(), ahead)
        return process

    def end(self) -> None:
        """End all processes that were started."""
        for process in self._started:
            process.end()
        self._started.clear()

    def close(self) -> None:
        self.end()
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait(LONG)
        self._server.stdout.close()


def die() -> None:
    """Kill this process, as if the machine's memory had run out."""
    os.kill(os.getpid(), signal.SIGKILL)


def obey(name: str, make: Callable[[], Any]) -> None:
    """Let an actor do what `Process` asks on a socket, until that is closed."""
    with socket.socket(socket.AF_UNIX) as told:
        told.connect(f"\0{name}")
        orders = Connection(told.detach())
    actor = make()
    while True:
        try:
            verb, args, kwargs = orders.recv()
        except EOFError:
            return
        try:
            answer = "said", getattr(actor, verb)(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - the test judges it
            answer = "raised", error
        orders.send(answer)


def serve(make: Callable[[], Any]) -> None:
    """Fork processes that each do what one actor does."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    while line := sys.stdin.readline():
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            try:
                obey(line.strip(), make)
            finally:
                os._exit(0)
        print(pid, flush=True)
