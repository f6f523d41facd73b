"""What tests of the arena share: a place of its own, small options, and processes that do as they are told.

Processes are forked, in milliseconds, from one that has imported the arena and nothing else, so that they can be killed
at an exact point. Started as a program, this module is that one: a line on its standard input names the socket on
which the next process takes its orders.
"""

from __future__ import annotations

import importlib
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from vllm_omni_sched.clock import monotonic_seconds, sleep_seconds
from vllm_omni_sched.connectors.arena import ArenaOptions, ArenaPath, meeting
from vllm_omni_sched.connectors.arena.index import Index
from vllm_omni_sched.connectors.base import Edge
from vllm_omni_sched.connectors.framing import make_message

KIB, MIB = 1 << 10, 1 << 20
EDGE = Edge("0", "1")
LONG = 30.0  # seconds nobody should ever wait
SHM = "/dev/shm"


@contextmanager
def place() -> Iterator[str]:
    """A directory in memory for arenas, empty again in the end."""
    with tempfile.TemporaryDirectory(dir=SHM if os.path.isdir(SHM) else None, prefix="arena-tests-") as root:
        yield root
        meeting.sweep(FilePath(root) / f"vllm-omni-sched-{os.geteuid()}")
        assert os.listdir(root) == []


def small(root: str, **options: Any) -> ArenaOptions:
    """An arena of a megabyte or two for each kind."""
    pool = {"block_bytes": 4 * KIB, "initial_bytes": 64 * KIB, "max_bytes": 1 * MIB, "inline_bytes": 1 * KIB}
    defaults: dict[str, Any] = {
        "text": pool,
        "image": pool,
        "audio": pool,
        "ring_bytes": 64 * KIB,
        "max_messages": 1024,
    }
    return ArenaOptions.model_validate({"directory": root, "arena": "a", **defaults, **options})


class FakeClock:
    """A clock that stands still until it is told to go."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def pixels(fill: int, nbytes: int) -> np.ndarray[Any, Any]:
    """A payload that goes through the pool, unless it is as small as what goes through the ring."""
    return np.full((1, nbytes), fill, np.uint8)


class Actor:
    """In a process: its path, and the payloads it holds."""

    def __init__(self) -> None:
        self.path: ArenaPath
        self.clock: Callable[[], float] = monotonic_seconds
        self.held: dict[str, Any] = {}

    def open(self, options: dict[str, Any], ahead: float = 0.0) -> None:
        self.clock = lambda: monotonic_seconds() + ahead
        self.path = ArenaPath(ArenaOptions.model_validate(options), clock=self.clock)

    def open_tiers(self, root: str, ahead: float = 0.0, **options: Any) -> None:
        """A path over tiers, or through files alone."""
        from tests.support import tiers

        self.clock = lambda: monotonic_seconds() + ahead
        self.path = tiers.small_tiers(root, self.clock, **options)  # type: ignore[assignment]

    def expect(self, key: str, seconds: float) -> bool:
        path: Any = self.path
        return bool(path.expect(EDGE, key, seconds))

    def move(self, steps: int) -> list[str]:
        """So many steps of moving the first message that should move."""
        path: Any = self.path
        moves = path.moves()
        going = path.carry(*moves[0])
        self.held["move"] = going
        return [stage.value for stage, _ in zip(going, range(steps), strict=False)]

    def put(self, key: str, nbytes: int, fill: int, edge: tuple[str, str] = EDGE) -> int:
        return self.path.put(make_message(Edge(*edge), key, {"x": pixels(fill, nbytes)}))

    def put_many(self, count: int, nbytes: int) -> int:
        return sum(self.put(f"m{i}", nbytes, i % 251) > 0 for i in range(count))

    def get(self, key: str, hold: bool = False, name: str | None = None) -> tuple[int, int] | None:
        """Bytes of the payload, and what it is filled with, -1: different things. Held under its key, or a name."""
        arrival = self.path.get(EDGE, key)
        if arrival is None:
            return None
        found = arrival.open()["x"]
        if hold:
            self.held[name or key] = found
        return found.size, int(found[0, 0]) if (found == found[0, 0]).all() else -1

    def send_all(self, count: int, receivers: int) -> None:
        """Messages of all sizes, and at last a word for each receiver."""
        for i in range(count):
            message = make_message(EDGE, f"{i}", {"x": pixels(i % 251, 8 + i * 37 % 9000)})
            self.path.put(message, monotonic_seconds() + LONG)
        for i in range(receivers):
            self.put(f"end {i}", 1, 0)

    def receive_all(self, count: int, receiver: int) -> list[int]:
        """Ask for every message again and again; numbers of those that were got, whole."""
        got: list[int] = []
        ended, held = False, list[Any]()
        until = monotonic_seconds() + LONG
        while monotonic_seconds() < until:
            for i in range(count):
                arrival = self.path.get(EDGE, f"{i}") if i not in got else None
                if arrival is not None:
                    held.append((arrival.open()["x"], i))
                    got.append(i)
                    del held[:-5]
                assert all((found == number % 251).all() for found, number in held)
            if ended:
                return got
            ended = self.get(f"end {receiver}") is not None
        raise AssertionError(f"nobody said that it was the end: {len(got)} of {count} messages were got")

    def come_and_go(self, options: dict[str, Any], count: int) -> int:
        """Open a path, send a message to oneself and close it; how often it was there."""
        there = 0
        for i in range(count):
            self.open(options)
            self.put(f"{os.getpid()} {i}", 10, 1)
            there += self.get(f"{os.getpid()} {i}") == (10, 1) and self.path.directory.is_dir()
            self.path.close()
        return there

    def look(self, key: str) -> int:
        """What a held payload is filled with; -1: with different things."""
        found = self.held[key]
        return int(found[0, 0]) if (found == found[0, 0]).all() else -1

    def drop(self, key: str) -> None:
        del self.held[key]

    def discard(self, key: str) -> int:
        return self.path.discard(key)

    def reap(self) -> int:
        return self.path.reap()

    def health(self) -> tuple[str, str, dict[str, Any]]:
        health = self.path.health()
        return health.status.value, health.reason, health.facts

    def close(self) -> None:
        self.path.close()

    def bury(self) -> int:
        inbox = self.path._inbox
        return inbox.bury() if inbox is not None else 0

    def die_at(self, where: str, after: bool = False, by: int = signal.SIGKILL) -> None:
        """Be killed (or stopped) at the next call of a function, given as ``module:Class.function``."""
        module, _, name = where.partition(":")
        owner: Any = importlib.import_module(module)
        *parents, name = name.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        real = getattr(owner, name)

        def deadly(*args: Any, **kwargs: Any) -> Any:
            setattr(owner, name, real)
            if not after:
                os.kill(os.getpid(), by)
            result = real(*args, **kwargs)
            if after:
                os.kill(os.getpid(), by)
            return result

        setattr(owner, name, deadly)

    def die_at_state(self, state: int) -> None:
        """Be killed where a slot would get this state."""
        real = Index._set

        def deadly(self: Index, slot: int, to: int) -> None:
            if to == state:
                die()
            real(self, slot, to)

        Index._set = deadly  # type: ignore[method-assign]

    def die_halfway_through(self, key: str, nbytes: int) -> None:
        """Be killed when half of a message is written."""
        message = make_message(EDGE, key, {"x": pixels(1, nbytes)})
        real = message.to_buffer()

        def write_to(target: memoryview, address: int, generation: int = 0) -> None:
            target[: len(real) // 2] = real[: len(real) // 2]
            die()

        message.write_to = write_to  # type: ignore[method-assign]
        self.path.put(message)

    def fork(self) -> int:
        """A child that does nothing until it is killed, once it is on its own."""
        read, write = os.pipe()
        child = os.fork()
        if not child:
            os.write(write, b".")
            signal.pause()
        os.read(read, 1)
        return child

    def fork_and_use(self) -> list[str]:
        """What a forked child is told when it uses the path; it drops what it holds and closes everything, too."""
        read, write = os.pipe()
        child = os.fork()
        if not child:
            said = []
            for use in (lambda: self.put("c", 10, 1), lambda: self.path.get(EDGE, "c")):
                try:
                    use()
                except Exception as error:  # noqa: BLE001 - it is what is asked for
                    said.append(f"{type(error).__name__}: {error}")
            said.append(str(self.path.discard("a") + self.path.reap()))
            said.append(self.path.health().status.value)
            self.held.clear()
            self.path.close()
            os.write(write, "\n".join(said).encode())
            os._exit(0)
        os.waitpid(child, 0)
        os.close(write)
        with os.fdopen(read) as told:
            return told.read().split("\n")

    def become(self, uid: int) -> None:
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)

    def try_to_open(self, path: str) -> str:
        try:
            os.close(os.open(path, os.O_RDONLY))
        except OSError as error:
            return type(error).__name__
        return "opened"

    def own_mount(self, root: str, nbytes: int) -> None:
        """A small tmpfs, seen by this process alone."""
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        new_namespace, private, recursive = 0x20000, 1 << 18, 1 << 14
        for failed in (
            libc.unshare(new_namespace),
            libc.mount(b"none", b"/", None, private | recursive, None),
            libc.mount(b"tmpfs", root.encode(), b"tmpfs", 0, f"size={nbytes}".encode()),
        ):
            if failed:
                raise OSError(ctypes.get_errno(), "no mount of one's own here")

    def free_bytes(self, root: str) -> int:
        found = os.statvfs(root)
        return found.f_bavail * found.f_frsize

    def fill(self, path: str, nbytes: int) -> None:
        fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        os.posix_fallocate(fd, 0, nbytes)
        os.close(fd)

    def remove(self, path: str) -> None:
        os.unlink(path)


class Died(Exception):
    """The process ended before it answered."""


class Process:
    """One that does what an `Actor` can."""

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

    def begin(self, name: str, *args: Any) -> None:
        """Something, and do not wait for it."""
        self._orders.send((name, args, {}))

    def result(self) -> Any:
        """What came of it."""
        assert self._orders.poll(LONG)
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
        """What came of it."""
        os.kill(self.pid, signal.SIGCONT)
        return self.result()

    def wait(self) -> None:
        """Until it has ended, and the kernel has taken back what it held."""
        if self._end is not None:
            assert select.select([self._end], [], [], LONG)[0], "it did not end"
            os.close(self._end)
            self._end = None
        self._orders.close()


class Processes:
    """Starts processes, and ends those that are left.

    Args:
        module: the program that forks them.
    """

    def __init__(self, module: str = "tests.support.arena") -> None:
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        root = FilePath(__file__).parents[2]
        self._server = subprocess.Popen(
            [sys.executable, "-m", module],
            cwd=root,
            env={**environment, "PYTHONPATH": str(root)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._started: list[Process] = []

    def start(self) -> Process:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        name = f"vos-{secrets.token_hex(8)}"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"\0{name}")
            listener.listen(1)
            listener.settimeout(LONG)
            self._server.stdin.write(f"{name}\n")
            self._server.stdin.flush()
            pid = int(self._server.stdout.readline())
            connection, _ = listener.accept()
            connection.setblocking(True)
        process = Process(pid, Connection(connection.detach()))
        self._started.append(process)
        return process

    def open(self, options: ArenaOptions, ahead: float = 0.0) -> Process:
        """A process with a path."""
        process = self.start()
        process.open(options.model_dump(), ahead)
        return process

    def end(self) -> None:
        """All that were started."""
        for process in self._started:
            if process._end is not None:
                process.kill()
        self._started.clear()

    def close(self) -> None:
        self.end()
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait(LONG)
        self._server.stdout.close()


def die() -> None:
    """As if the machine's memory had run out."""
    os.kill(os.getpid(), signal.SIGKILL)


def _obey(name: str, make: Callable[[], Any]) -> None:
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


def serve(make: Callable[[], Any] = Actor) -> None:
    """Fork processes that each do what one actor does."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    while line := sys.stdin.readline():
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            try:
                _obey(line.strip(), make)
            finally:
                os._exit(0)
        print(pid, flush=True)


if __name__ == "__main__":
    serve()
