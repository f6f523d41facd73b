"""Send and receive through an arena on request: a program for `tests.support.processes`."""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Callable
from typing import Any

from tests.support.arena import EDGE, LONG, pixels
from tests.support.processes import die, serve
from vllm_omni_sched.clock import monotonic_seconds
from vllm_omni_sched.connectors.arena import ArenaOptions, ArenaTransport
from vllm_omni_sched.connectors.arena.index import Index
from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.framing import make_message


class Actor:
    """Runs in a process, with its transport and the payloads it holds."""

    def __init__(self) -> None:
        self.path: ArenaTransport
        self.clock: Callable[[], float] = monotonic_seconds
        self.held: dict[str, Any] = {}

    def open(self, options: dict[str, Any], ahead: float = 0.0) -> None:
        self.clock = lambda: monotonic_seconds() + ahead
        self.path = ArenaTransport(ArenaOptions.model_validate(options), clock=self.clock)

    def open_tiers(self, root: str, ahead: float = 0.0, **options: Any) -> None:
        """Open a transport over tiers."""
        from tests.support import tiers

        self.clock = lambda: monotonic_seconds() + ahead
        self.path = tiers.small_tiers(root, self.clock, **options)  # type: ignore[assignment]

    def open_files(self, root: str) -> None:
        """Open a transport through files."""
        from tests.support import tiers

        self.path = tiers.disk(root)  # type: ignore[assignment]

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
        """Send messages of all sizes, and at last an end mark for each receiver."""
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

    def sleep(self, seconds: float) -> None:
        """Sleep until there is a message."""
        arrivals = self.path.arrivals(EDGE)
        assert arrivals is not None
        arrivals.wait(arrivals.ticket(), seconds)

    def look(self, key: str) -> int:
        """Return the value that a held payload is filled with; -1 if its values differ."""
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

        def write_to(target: memoryview, address: int, generation: int = 0, checked: bool = False) -> None:
            target[: len(real) // 2] = real[: len(real) // 2]
            die()

        message.write_to = write_to  # type: ignore[method-assign]
        self.path.put(message)

    def fork(self) -> int:
        """Fork a child that waits until it is killed, and return its process id once it runs."""
        read, write = os.pipe()
        child = os.fork()
        if not child:
            os.write(write, b".")
            signal.pause()
        os.read(read, 1)
        return child

    def fork_and_use(self) -> list[str]:
        """Return the errors that a forked child gets when it uses the path; it also drops and closes everything."""
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
        """Mount a small tmpfs that only this process sees."""
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


if __name__ == "__main__":
    serve(Actor)
