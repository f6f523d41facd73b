"""Hosts that are namespaces: each has its own network and its own shared memory, and a bridge joins them."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

NEW_NETWORK, NEW_MOUNTS = 0x40000000, 0x00020000  # CLONE_NEWNET, CLONE_NEWNS
PREFIX = "10.77.0"
SHARED_MEMORY = "mount -t tmpfs tmpfs /dev/shm && "
_READY = "ready"
_libc = ctypes.CDLL(None, use_errno=True)


def why_not() -> str:
    """Why no hosts can be made on this machine, "" if they can."""
    missing = [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]
    if not sys.platform.startswith("linux") or missing:
        return f"hosts are network namespaces, which need Linux and the commands {', '.join(missing) or 'ip'}"
    made = subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True, text=True)
    return f"no namespaces can be made here ({made.stderr.strip()}): that takes root" if made.returncode else ""


class _Namespaces:
    """A network and a mount namespace, kept by a process that sleeps."""

    def __init__(self, setup: str = "") -> None:
        script = f"{setup}ip link set lo up && echo {_READY} && exec sleep infinity"
        command = ["unshare", "--net", "--mount", "--propagation", "private", "sh", "-c", script]
        self._holder = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self._holder.stdout is not None
        assert self._holder.stderr is not None
        if self._holder.stdout.readline().strip() != _READY:
            raise RuntimeError(f"a host could not be made: {self._holder.stderr.read().strip()}")

    @property
    def pid(self) -> int:
        """Return the process that keeps the namespaces."""
        return self._holder.pid

    def run(self, *command: str) -> str:
        """Run a command in there, and return its output."""
        done = subprocess.run(["nsenter", "-t", str(self.pid), "-n", "-m", *command], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def close(self) -> None:
        self._holder.kill()
        self._holder.wait()
        for stream in (self._holder.stdout, self._holder.stderr):
            if stream is not None:
                stream.close()


class Host(_Namespaces):
    """A host: device ``eth0`` with an address in `PREFIX`, and a ``/dev/shm`` that no other host sees."""

    def __init__(self, network: Network, number: int) -> None:
        super().__init__(SHARED_MEMORY)
        self.address = f"{PREFIX}.{number}"
        self._port = f"port{number}"
        self._started: list[subprocess.Popen[bytes]] = []
        self._switch = network.switch
        self._switch.run(
            *("ip", "link", "add", self._port, "type", "veth", "peer", "name", "eth0", "netns", str(self.pid))
        )
        self._switch.run("ip", "link", "set", self._port, "master", "bridge0", "up")
        self.run("ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        self.run("ip", "link", "set", "eth0", "up")

    @contextmanager
    def inside(self) -> Iterator[None]:
        """This thread, and what it starts, is in the network of the host meanwhile, with the memory of everybody."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _enter(self.pid, "net", NEW_NETWORK)
            yield
        finally:
            if _libc.setns(before, NEW_NETWORK):
                raise OSError(ctypes.get_errno(), "leaving the network of a host failed")
            os.close(before)

    def start(self, command: Sequence[str]) -> None:
        """Start a program that `kill` and `close` end."""
        enter = ["nsenter", "-t", str(self.pid), "-n", "-m"]
        self._started.append(subprocess.Popen([*enter, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))

    def cut(self) -> None:
        """Cut the link: packets are lost, and nobody is told."""
        self._switch.run("ip", "link", "set", self._port, "down")

    def mend(self) -> None:
        """Restore the link."""
        self._switch.run("ip", "link", "set", self._port, "up")

    def limit(self, bits_per_second: int) -> None:
        """Limit the link, in both directions, with a token bucket (``tc tbf``)."""
        burst = max(bits_per_second // 8 // 2000, 128 << 10)  # half a millisecond, and two of the largest packets
        for where, device in ((self, "eth0"), (self._switch, self._port)):
            shape = ["tbf", "rate", f"{bits_per_second}bit", "burst", str(burst), "latency", "200ms"]
            where.run("tc", "qdisc", "replace", "dev", device, "root", *shape)

    def pids(self) -> list[int]:
        """Return the processes of the host, without the one that keeps the namespaces."""
        mine, found = os.stat(f"/proc/{self.pid}/ns/net").st_ino, []
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) != self.pid:
                with suppress(OSError):
                    if os.stat(f"/proc/{name}/ns/net").st_ino == mine:
                        found.append(int(name))
        return found

    def kill(self) -> None:
        """Kill all processes of the host at once, as a loss of power does; returns when they are gone."""
        self._signal(signal.SIGKILL)
        until = time.monotonic() + 60
        while any(_runs(pid) for pid in self.pids()):
            assert time.monotonic() < until, "processes of a host survive SIGKILL"
            self._signal(signal.SIGKILL)
            time.sleep(0.01)

    def freeze(self) -> None:
        """Stop all processes of the host; they say nothing any more."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let stopped processes go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def close(self) -> None:
        self.kill()
        for process in self._started:
            process.wait()
        super().close()


class Network:
    """Hosts on a bridge: ``with Network() as network: a, b = network.host(), network.host()``."""

    def __init__(self) -> None:
        self.switch = _Namespaces()
        self.switch.run("ip", "link", "add", "bridge0", "type", "bridge")
        self.switch.run("ip", "link", "set", "bridge0", "up")
        self.hosts: list[Host] = []

    def host(self) -> Host:
        """Add a host."""
        host = Host(self, len(self.hosts) + 1)
        self.hosts.append(host)
        return host

    def close(self) -> None:
        for host in self.hosts:
            host.close()
        self.switch.close()

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def enter(holder: int) -> None:
    """Move this process, which has one thread, into the namespaces that a process keeps."""
    folder = os.getcwd()
    for name, kind in (("net", NEW_NETWORK), ("mnt", NEW_MOUNTS)):
        _enter(holder, name, kind)
    os.chdir(folder)


def _enter(holder: int, name: str, kind: int) -> None:
    descriptor = os.open(f"/proc/{holder}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC)
    if _libc.setns(descriptor, kind):
        raise OSError(ctypes.get_errno(), f"entering the {name} namespace of process {holder} failed")
    os.close(descriptor)


def _runs(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def mooncake_master(host: Host, port: int) -> list[str]:
    """Return the command that starts a Mooncake master for `Host.start`."""
    spec = importlib.util.find_spec("mooncake")
    assert spec is not None
    assert spec.submodule_search_locations
    flags = {"rpc_address": host.address, "rpc_port": port, "metrics_host": host.address, "metrics_port": port + 100}
    flags |= {"client_ttl": 10, "default_kv_lease_ttl": "30s", "rpc_thread_num": 2}
    binary = Path(spec.submodule_search_locations[0]) / "mooncake_master"
    return [str(binary), *(f"--{name}={value}" for name, value in flags.items())]
