"""Client of a Mooncake store: its calls, and the meaning of their return codes."""

from __future__ import annotations

import ctypes
import hashlib
import os
import socket
import struct
import threading
import weakref
import zlib
from collections.abc import Callable
from typing import Any

from vllm_omni_sched.clock import Clock, sleep_seconds
from vllm_omni_sched.config.errors import ConfigError, RendezvousError, TransportClosedError
from vllm_omni_sched.config.extras import how_to_install
from vllm_omni_sched.connectors.mooncake.calls import Calls
from vllm_omni_sched.connectors.mooncake.options import MIB, MooncakeOptions

OK = 0
NO_ROOM, TOO_SMALL, NOT_READY, MISSING, LEASE_OVER, RPC = -200, -600, -703, -704, -707, -900
"""Return codes. `LEASE_OVER`: all was read, but took longer than the lease. `RPC`: the master does not answer."""
LIBRARY_BUFFER = 16 * MIB  # for calls that we do not make
CLOSING_SECONDS = 5.0
SETTINGS = {
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",  # otherwise the library tries for 90 s, whichever timeout is set
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",  # otherwise it connects anew for each message
}
"""Environment variables of the library that this package sets, unless they are set already."""


class MasterGoneError(RendezvousError):
    """The master does not answer."""


def load_library() -> Any:
    """Import and return the module `mooncake.store`.

    Raises:
        ConfigError: it is not installed, or what it needs of the system is not.
    """
    try:
        import mooncake.store as library
    except ModuleNotFoundError as error:
        raise ConfigError(
            "the Mooncake transport needs mooncake-transfer-engine, which is not installed: "
            f"`{how_to_install('mooncake')}` (on hosts without CUDA: mooncake-transfer-engine-non-cuda)"
        ) from error
    except ImportError as error:
        raise ConfigError(
            f"mooncake-transfer-engine does not load ({error}): install the system libraries that it needs "
            "(Debian and Ubuntu: libibverbs1 libnuma1 libcurl4), or the build that fits this host"
        ) from error
    return library


class Store:
    """Calls a Mooncake store. The calls have deadlines, and are safe against `close` on another thread.

    Attributes:
        sick: why nothing works at present, "" when it does.
        answers: of the master; more with each.
        segment: the name of this process's segment, "" without one.

    Raises:
        ConfigError: see `load_library`.
        RendezvousError: there is no master, or it does not take us.
    """

    def __init__(self, options: MooncakeOptions, clock: Clock) -> None:
        self._options = options
        self._library = load_library()
        self.protocol = options.protocol()
        reach_master(options, clock)
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        self.calls = Calls(clock)
        self._closing = threading.Lock()
        self._closed = False
        self.sick = ""
        self.answers = 0
        self._client = self._library.MooncakeDistributedStore()
        _forget_in_children(self)
        memory, network = (options.segment, LIBRARY_BUFFER), (self.protocol, options.rdma, options.master)
        arguments = (options.host, options.metadata_server, *memory, *network)
        try:
            code = self.calls.run(options.connect_timeout_seconds, self._client.setup, *arguments)
        except RendezvousError:
            self.calls.close(0.0)
            self.keep()
            raise
        if code != OK:
            self._end()
            raise RendezvousError(
                f"the Mooncake library could not set up {options.host} with the master at {options.master} over "
                f"{self.protocol} (code {code}): see its log, and the connector's `host`, `master` and `proto`"
            )
        self.segment: str = self._client.get_hostname() if options.segment else ""

    def config(self, *, replicas: int = 1, pinned: bool = True) -> Any:
        """Return how objects are put: in our own segment, and safe from eviction if ``pinned``."""
        config = self._library.ReplicateConfig()
        config.replica_num = replicas
        config.with_hard_pin = pinned
        if self.segment:
            config.preferred_segment = self.segment
        return config

    def exist(self, keys: list[str]) -> list[bool]:
        """Return which of the keys the master knows, in one call.

        Raises:
            MasterGoneError: it does not answer.
        """
        codes = self._ask(self._client.batch_is_exist, keys)
        if any(code < 0 for code in codes):
            raise self.gone(min(codes))
        return [code == 1 for code in codes]

    def size(self, key: str) -> int:
        """Return the size of an object in bytes, or a negative code."""
        return int(self._ask(self._client.get_size, key))

    def get_into(self, key: str, address: int, nbytes: int, late: Callable[[Any], None]) -> int:
        """Read into registered memory; return the bytes, or a negative code. ``late``: see `Calls.run`."""
        seconds = self._options.transfer_seconds(nbytes)
        return int(self.calls.run(seconds, self._client.get_into, key, address, nbytes, late=late))

    def take(self, key: str, address: int, nbytes: int, late: Callable[[Any], None]) -> tuple[int, int]:
        """Read and then remove an object in one call; return the results of both. ``late``: see `Calls.run`."""
        return self.calls.run(  # type: ignore[no-any-return]
            self._options.transfer_seconds(nbytes), self._read_and_claim, key, address, nbytes, late=late
        )

    def claim(self, key: str) -> int:
        """Remove one object, on the thread of a call; return 0 if this process was the first."""
        return int(self._client.remove(key, True))

    def put_from(self, key: str, address: int, nbytes: int, config: Any, late: Callable[[Any], None]) -> int:
        """Put registered memory under a key, replacing its object; return 0, or a negative code."""
        seconds = self._options.transfer_seconds(nbytes)
        return int(self.calls.run(seconds, self._client.upsert_from, key, address, nbytes, config, late=late))

    def remove(self, keys: list[str], *, leased: bool = True) -> list[int]:
        """Remove objects at once; return 0 for each that existed.

        Args:
            keys: of the objects.
            leased: whether also those that somebody has read of late, and may still be reading.

        Raises:
            MasterGoneError: it does not answer: what was removed is not known.
        """
        if not keys:
            return []
        return [int(code) for code in self._ask(self._client.batch_remove, keys, leased)]

    def replicas(self, key: str) -> int:
        """Return the number of segments that hold an object."""
        return len(self._ask(self._client.get_replica_desc, key))

    def register(self, address: int, nbytes: int) -> None:
        """Register memory with the library, which may then read and write it.

        Raises:
            RendezvousError: it does not take it.
        """
        code = self.calls.run(self._options.transfer_seconds(nbytes), self._client.register_buffer, address, nbytes)
        if code != OK:
            raise RendezvousError(f"the Mooncake library could not register {nbytes} bytes (code {code})")

    def unregister(self, address: int) -> None:
        """Withdraw memory from the library; see `register`."""
        self._ask(self._client.unregister_buffer, address)

    def close(self) -> None:
        """Close the client once no call is in flight; one with hanging calls is left to the end of the process."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            if self.calls.close(0.0 if self.sick else CLOSING_SECONDS) and not self.sick:
                self._end()
            else:
                self.keep()

    def keep(self) -> None:
        """Keep the client from being destroyed, because threads use it, or it belongs to the parent process."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._client))

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            answer = self.calls.run(self._options.call_timeout_seconds, function, *arguments)
        except TransportClosedError:
            raise
        except RendezvousError as error:
            self.sick = f"the Mooncake master at {self._options.master} does not answer: {error}"
            raise MasterGoneError(self.sick) from error
        if answer == RPC or (isinstance(answer, list) and RPC in answer):
            raise self.gone(RPC)
        self.sick = ""
        self.answers += 1
        return answer

    def _read_and_claim(self, key: str, address: int, nbytes: int) -> tuple[int, int]:
        read = int(self._client.get_into(key, address, nbytes))
        return read, self.claim(key) if read > 0 or read == LEASE_OVER else MISSING

    def gone(self, code: int) -> MasterGoneError:
        """Return the error to raise for a call that returned `RPC`."""
        self.sick = f"the Mooncake master at {self._options.master} does not answer (code {code})"
        return MasterGoneError(self.sick)

    def _end(self) -> None:
        ending = Calls(self.calls._clock)
        try:
            ending.run(CLOSING_SECONDS, self._client.close)
        except RendezvousError:
            self.keep()
        ending.close(0.0)


def reach_master(options: MooncakeOptions, clock: Clock) -> None:
    """Wait until a process listens at the master's address: the library waits silently, and then returns only a
    code.

    Raises:
        RendezvousError: none does within ``connect_timeout_seconds``.
    """
    until = clock() + options.connect_timeout_seconds
    while True:
        try:
            socket.create_connection(options.master_address, timeout=max(0.1, min(2.0, until - clock()))).close()
            return
        except OSError as error:
            if isinstance(error, socket.gaierror) or clock() >= until:
                raise RendezvousError(
                    f"no Mooncake master answers at {options.master} ({error}): start `mooncake_master` there, or set "
                    "the connector's `master`"
                ) from error
        sleep_seconds(0.1)


def _forget_in_children(store: Store) -> None:
    """Keep forked children from destroying the client, whose sockets they share with us."""
    kept = weakref.ref(store)

    def forget() -> None:
        if (store := kept()) is not None:
            store.keep()

    os.register_at_fork(after_in_child=forget)


_LINK = struct.Struct("<QI")
LINK_BYTES = _LINK.size


class Names:
    """Keys of one namespace.

    1. A message is stored under the *plain* key of its name, which its receiver can derive.
    2. After its sender has taken a message back, a key is not used again while a receiver may still be reading it. The
       next message of that name is stored under a key *of its own*, and a *link* contains that key.

    A message that could be removed after it was read was therefore complete while it was read.
    """

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    def plain(self, name: bytes) -> str:
        return f"{self._namespace}/{hashlib.blake2b(name, digest_size=16).hexdigest()}"

    def beacon(self, token: int, life: int) -> str:
        """Return the key of a sender's beacon, which shows whether the master has lost data since."""
        return f"{self._namespace}/sender/{token:08x}/{life}"


def own_key(plain: str, generation: int) -> str:
    """Return the key of one message alone."""
    return f"{plain}/{generation:016x}"


def link_key(plain: str) -> str:
    """Return the key of a name's link."""
    return f"{plain}/link"


def make_link(generation: int) -> bytes:
    """Return the content of a link."""
    return _LINK.pack(generation, zlib.crc32(generation.to_bytes(8, "little")))


def read_link(data: bytes) -> int | None:
    """Return the generation to which a link leads; None if it is being written."""
    if len(data) != LINK_BYTES:
        return None
    generation, checksum = _LINK.unpack(data)
    return int(generation) if zlib.crc32(generation.to_bytes(8, "little")) == checksum else None
