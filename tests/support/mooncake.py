"""Run a Mooncake master on loopback in a network namespace of its own, and paths to it.

Mooncake clients listen on all interfaces, so nothing of it runs outside such a namespace.
"""

from __future__ import annotations

import importlib.util
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.support.namespaces import Namespace, home
from tests.support.stopping import stop
from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.connectors.mooncake import MooncakeOptions, MooncakeTransport
from vllm_omni_sched.connectors.mooncake.store import load_library

START_SECONDS = 15.0


def why_not() -> str:
    """Why Mooncake cannot be tested on this machine, "" if it can."""
    try:
        load_library()
    except ConfigError as error:
        return str(error)
    if not sys.platform.startswith("linux") or shutil.which("ip") is None:
        return "Mooncake is tested in network namespaces, which need Linux and the command `ip`"
    try:
        home()
    except OSError as error:
        return f"no network namespace can be made here ({error.strerror}): that takes root"
    return ""


class Master:
    """`mooncake_master`, in a namespace; it can be killed, stopped, continued and started again at its address."""

    def __init__(self, namespace: Namespace, host: str = "127.0.0.1", **flags: Any) -> None:
        self._namespace, self._host = namespace, host
        self._flags = {"default_kv_lease_ttl": "30s", "client_ttl": 10, "rpc_thread_num": 2, **flags}
        with namespace.inside():
            self.port, self._metrics_port = _free_ports(host, 2)
        self.address = f"{host}:{self.port}"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (`close` does)
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Returns when it listens."""
        spec = importlib.util.find_spec("mooncake")
        assert spec is not None
        assert spec.submodule_search_locations
        binary = Path(spec.submodule_search_locations[0]) / "mooncake_master"
        flags = {
            **self._flags,
            "rpc_address": self._host,
            "rpc_port": self.port,
            "metrics_host": self._host,
            "metrics_port": self._metrics_port,
        }
        command = [str(binary), *(f"--{name}={value}" for name, value in flags.items())]
        with self._namespace.inside():
            self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)
            until = time.monotonic() + START_SECONDS
            while True:
                try:
                    socket.create_connection((self._host, self.port), timeout=1).close()
                    return
                except OSError:
                    if time.monotonic() > until or self._process.poll() is not None:
                        self.kill()
                        raise RuntimeError(f"mooncake_master does not start:\n{self.log()[-2000:]}") from None
                time.sleep(0.02)

    def kill(self) -> None:
        """At once, as a crash does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self, seconds: float) -> None:
        """Stop the master for so long, in the background: meanwhile it answers nobody."""
        process = self._process
        assert process is not None
        stop(process.pid)
        threading.Timer(seconds, process.send_signal, (signal.SIGCONT,)).start()

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def close(self) -> None:
        self.kill()
        self._log.close()


class Deployment:
    """A master with transports to it: ``with Deployment() as deployment: deployment.path()``."""

    def __init__(self, **flags: Any) -> None:
        self._stack = ExitStack()
        self.namespace = home()
        self.master = Master(self.namespace, **flags)
        self._stack.callback(self.master.close)

    def options(self, **options: Any) -> MooncakeOptions:
        """Return options of a small transport to this master."""
        defaults = {"segment": "256MB", "localbuf": "128MB", "proto": "tcp", "master": self.master.address}
        return MooncakeOptions(**{**defaults, **options})

    def path(self, **options: Any) -> MooncakeTransport:
        """Return a path of this process, which is closed with the deployment."""
        with self.namespace.inside():
            path = MooncakeTransport(self.options(**options))
        self._stack.callback(self._close_path, path)
        return path

    def inside(self) -> Any:
        """Threads that call a path's methods have to be in here, since they may start threads of the path."""
        return self.namespace.inside()

    def child(self, script: str, *arguments: str) -> Child:
        """Start a process with a transport of its own; see `Child`."""
        with self.namespace.inside():
            child = Child(script, self.options().model_dump_json(), *arguments)
        self._stack.callback(child.close)
        return child

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Deployment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _close_path(self, path: MooncakeTransport) -> None:
        with self.namespace.inside():
            path.close()


PRELUDE = """
import sys, time, faulthandler
faulthandler.dump_traceback_later(float(__import__("os").environ.get("CHILD_SECONDS", 60)), exit=True)
import numpy as np
from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.framing import make_message
from vllm_omni_sched.connectors.mooncake import MooncakeOptions, MooncakeTransport
from tests.support.mooncake import received
path = MooncakeTransport(MooncakeOptions.model_validate_json(sys.argv[1]))
edge = Edge("0", "1")
def say(*words):
    print("#", *words, flush=True)
"""


class Child:
    """A Python process, started where this thread is: a prelude makes ``path``, then the script runs.

    Args:
        script: may `say` things, and read lines.
        options: of its path, as JSON.
    """

    def __init__(self, script: str, options: str, *arguments: str) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (`close` does)
        self.process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + script, options, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def heard(self) -> str:
        """Return the next message of the process; the rest of its output is Mooncake's."""
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            if line.startswith("# "):
                return line[2:].strip()
        raise AssertionError(f"the child said nothing more; its errors end with:\n{self.errors()[-3000:]}")

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        for stream in (self.process.stdin, self.process.stdout, self._errors):
            if stream is not None:
                stream.close()


def arrived(path: Any, edge: Any, key: str, seconds: float = 20.0) -> Any:
    """Return the arrival once it is there; None if it does not come in time."""
    until = time.monotonic() + seconds
    while (arrival := path.get(edge, key)) is None:
        if time.monotonic() > until:
            return None
        time.sleep(0.001)
    return arrival


def received(path: Any, edge: Any, key: str, seconds: float = 20.0) -> Any:
    """Return the payload once it is there; None if it does not come in time."""
    arrival = arrived(path, edge, key, seconds)
    return None if arrival is None else arrival.open()


def _free_ports(host: str, count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((host, 0))
        return [one.getsockname()[1] for one in sockets]
