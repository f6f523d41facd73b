"""Python programs that begin with vLLM imported: forked from a server, in place of ten seconds of imports each.

The processes of pytest share one server, which `prepare` starts before they are forked; without it, each has one of its
own, which starts with the first program. A program is as it would be otherwise: a process with the command, the
environment and the log that it was given, the leader of its own session, in the network namespace of the thread that
starts it. What it spawns through multiprocessing is forked as well, from a copy of the program that was made before it
began. vLLM looks at a model's class in the program itself, where it would start another process, which imports vLLM and
leaves CUDA alone.

Tests of what an import does, or of a start as users have it, start their programs in the usual way.
"""

from __future__ import annotations

import array
import atexit
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from dev.fork_spawned import choose_where_metrics_are, fork_what_is_spawned
from dev.frozen_heap import freeze_for_good
from dev.model_registry import look_at_models_here
from tests.support import namespaces

ROOT = Path(__file__).parents[2]
MODULES = (
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.llm",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
)
READ_LATE = ("VLLM_", "PYTEST_")
READ_AT_IMPORT = ("VLLM_LOGGING", "VLLM_CONFIGURE_LOGGING", "VLLM_TARGET_DEVICE")
"""Beginnings of the names of variables that may, and of those that may not differ between a program and the server."""
MESSAGE_BYTES = 1 << 18


class WarmPopen:
    """Implements the part of `subprocess.Popen` that `dev.child_process` needs, for a program that the server forks.

    Args:
        command: an interpreter of this environment with ``-m`` and a module, or a script of it, and their arguments.
        stdout: where its output and its errors go.
        env: its whole environment.
        modules: what it begins with; those that this version of vLLM lacks are left out.
        plugins: the plugins of vLLM that these modules see when they are imported, as in ``VLLM_PLUGINS``.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdout: IO[bytes],
        env: Mapping[str, str],
        modules: Sequence[str] = MODULES,
        plugins: str = "",
        **_: Any,
    ) -> None:
        self.returncode: int | None = None
        end, tell = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with tell:
            _server_for(env, modules, plugins).fork(command, env, stdout.fileno(), tell.fileno())
        self._end = end
        self.pid = int(end.recv(64))

    def poll(self) -> int | None:
        return self._told(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._told(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def terminate(self) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def _told(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            self._end.settimeout(timeout)
            try:
                said = self._end.recv(64)
            except (BlockingIOError, TimeoutError):
                return None
            self.returncode = int(said) if said else 255  # the server itself has died
            self._end.close()
        return self.returncode


class _Server:
    """The process that forks programs."""

    def __init__(self, environment: Mapping[str, str], modules: Sequence[str]) -> None:
        self.environment, self.modules = dict(environment), tuple(modules)
        self._asks, asked = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._asks.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE_BYTES)
        with asked:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.warm", str(asked.fileno()), *modules],
                cwd=ROOT,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[asked.fileno()],
                start_new_session=True,
            )
        atexit.register(self.close)

    def fork(self, command: Sequence[str], env: Mapping[str, str], output: int, tell: int) -> None:
        message = json.dumps({"command": list(command), "env": dict(env), "cwd": os.getcwd()}).encode()
        network = os.open(namespaces.HERE, os.O_RDONLY | os.O_CLOEXEC)
        fds = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [output, tell, network]))]
        self._asks.sendmsg([message], fds)
        os.close(network)

    def close(self) -> None:
        """End the server, which leaves programs alone that still run."""
        self._asks.close()
        self._process.wait()


_servers: list[_Server] = []
_one_at_a_time = threading.Lock()


def _late(name: str) -> bool:
    return name.startswith(READ_LATE) and not name.startswith(READ_AT_IMPORT)


def prepare(env: Mapping[str, str]) -> None:
    """Start the server of programs with this environment, which processes that are forked from this one share."""
    _server_for({**os.environ, **env}, MODULES, "")


def _server_for(env: Mapping[str, str], modules: Sequence[str], plugins: str) -> _Server:
    """Return the server whose imports saw the same environment, as far as imports read it."""
    asked = {name: value for name, value in env.items() if not _late(name)} | {"VLLM_PLUGINS": plugins}
    with _one_at_a_time:
        for server in _servers:
            if (server.environment, server.modules) == (asked, tuple(modules)):
                return server
        _servers.append(_Server(asked, modules))
        return _servers[-1]


def _serve(asked: socket.socket, modules: Sequence[str]) -> dict[str, Any] | None:
    """Fork programs until nobody asks any more. Returns in each of them what it shall run; None in the server."""
    for module in modules:
        with suppress(ImportError):  # it has another name in another version: that program imports it itself
            import_module(module)
    look_at_models_here()
    freeze_for_good()
    ended, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    told: dict[int, socket.socket] = {}
    import select

    while True:
        ready, _, _ = select.select([asked, ended], [], [])
        if ended in ready:
            ended.recv(4096)
            _tell_who_ended(told)
        if asked not in ready:
            continue
        message, fds, _, _ = socket.recv_fds(asked, MESSAGE_BYTES, 3)
        if not message:
            return None
        output, tell, network = fds[0], socket.socket(fileno=fds[1]), fds[2]
        pid = os.fork()
        if pid:
            os.close(output)
            os.close(network)
            told[pid] = tell
            tell.send(str(pid).encode())
            continue
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for one in (asked, ended, wake, tell, *told.values()):
            one.close()
        program: dict[str, Any] = json.loads(message)
        _take_place(program, output, network)
        return program


def _tell_who_ended(told: dict[int, socket.socket]) -> None:
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            with told.pop(found[0]) as tell, suppress(OSError):
                tell.send(str(os.waitstatus_to_exitcode(found[1])).encode())


def _take_place(program: Mapping[str, Any], output: int, network: int) -> None:
    """Become the program: session, network, output, environment, folder."""
    os.setsid()
    namespaces.move_to(network)
    os.close(network)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(program["env"])
    os.chdir(program["cwd"])
    choose_where_metrics_are()
    fork_what_is_spawned()


def _run(command: Sequence[str]) -> None:
    if list(command[1:2]) == ["-m"]:
        sys.argv = list(command[2:])
        runpy.run_module(command[2], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(command)
        sys.path[0] = str(Path(command[0]).parent)
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    program = _serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
    if program is not None:
        _run(program["command"])
