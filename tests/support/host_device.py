"""A device whose memory is that of the host: what `CudaShare` does, between real processes, without a card.

A block is an anonymous file that other processes map through ``/proc``, and gone when its process is: as with CUDA, a
process does not open its own, and nothing that was mapped keeps the name of what it maps.
"""

from __future__ import annotations

import mmap
import os
import secrets
import weakref
from typing import Any

import numpy as np
import torch

from tests.support.arena import MIB, small
from vllm_omni_sched.connectors.arena import ArenaOptions
from vllm_omni_sched.connectors.cuda_ipc.cuda import CudaShare
from vllm_omni_sched.connectors.cuda_ipc.driver import Driver, Exported, Mapping
from vllm_omni_sched.connectors.cuda_ipc.share import CudaIpcOptions, ShareReason
from vllm_omni_sched.connectors.cuda_ipc.transport import CudaIpcTransport
from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.transport import Transport


class Event:
    """Reached when the test says so; at once, by default."""

    def __init__(self, reached: bool) -> None:
        self.reached = reached

    def query(self) -> bool:
        return self.reached


class HostDriver(Driver):
    """Driver with one device, on which all tensors of the host are.

    Args:
        names: of the devices that this process sees.
    """

    def __init__(self, *names: str) -> None:
        self.names = list(names or ("host-0",))
        self.calls: list[str] = []
        self.hindrance: ShareReason | None = None
        self.room = 1 << 40
        self.fails: dict[str, Exception | ShareReason] = {}
        self.events: list[Event] = []
        self.waited: list[Event] = []  # for which of them
        self.idle = True  # events are reached at once
        self.exported = 0
        self.files: dict[int, int] = {}  # descriptors by the address of a block

    def uuids(self) -> list[str]:
        return self.names

    def index_of(self, tensor: torch.Tensor) -> int | None:
        return 0 if self.names else None

    def obstacle(self) -> ShareReason | None:
        return self.hindrance

    def allocate(self, index: int, nbytes: int) -> torch.Tensor:
        if nbytes > self.room:
            raise MemoryError("no memory on the device")
        fd = os.memfd_create(f"block-{secrets.token_hex(8)}")
        os.ftruncate(fd, nbytes)
        flat = np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)
        block = torch.frombuffer(flat, dtype=torch.uint8)
        self.files[block.data_ptr()] = fd
        weakref.finalize(flat, self._free, block.data_ptr(), fd).atexit = False
        return block

    def _free(self, address: int, fd: int) -> None:
        del self.files[address]
        os.close(fd)

    def export(self, block: torch.Tensor) -> Exported | ShareReason:
        failure = self.fails.get("export")
        if isinstance(failure, Exception):
            raise type(failure)(*failure.args)
        if failure is not None:
            return failure
        fd = self.files[block.data_ptr()]
        name = os.readlink(f"/proc/self/fd/{fd}")
        self.calls.append("export")
        self.exported += 1
        return Exported(f"{os.getpid()} {fd} {name}".encode(), block.numel(), 0, b"event", (b"", 0))

    def unexport(self, exported: Exported) -> None:
        assert self.exported > 0, "released twice"
        self.exported -= 1

    def map(self, index: int, exported: Exported, keep: list[Any]) -> Mapping:
        if isinstance(failure := self.fails.get("map"), Exception):
            raise failure
        pid, fd, name = exported.memory.decode().split(" ", 2)
        if int(pid) == os.getpid():
            raise RuntimeError("invalid device context: a process cannot open what is its own")
        if exported.event:
            self.calls.append("wait")
        path = f"/proc/{pid}/fd/{fd}"
        file = os.open(path, os.O_RDWR)
        try:
            if os.readlink(path) != name or os.fstat(file).st_size < exported.offset + exported.nbytes:
                raise RuntimeError("invalid resource handle")
            flat = np.frombuffer(mmap.mmap(file, exported.nbytes), np.uint8)
        finally:
            os.close(file)
        weakref.finalize(flat, keep.clear).atexit = False
        self.calls.append("map")
        return Mapping(torch.frombuffer(flat, dtype=torch.uint8), lambda: self.calls.append("finished"))

    def own(self, index: int, block: torch.Tensor, event: Event, keep: list[Any]) -> Mapping:
        self.calls.append("wait")
        self.waited.append(event)
        flat = np.frombuffer(memoryview(block.numpy()), np.uint8)
        weakref.finalize(flat, keep.clear).atexit = False
        return Mapping(torch.frombuffer(flat, dtype=torch.uint8), lambda: self.calls.append("finished"))

    def record(self, index: int) -> Event:
        self.events.append(Event(self.idle))
        return self.events[-1]

    def collect(self) -> None:
        self.calls.append("collect")


def device_path(
    arena: ArenaOptions, driver: HostDriver | None = None, clock: Any = None, **options: Any
) -> CudaIpcTransport:
    """Return a path whose device is the host's memory; by default every tensor is worth sharing."""
    made = driver or HostDriver()
    chosen = CudaIpcOptions.model_validate({"min_bytes": 1, **options})
    clocks = {} if clock is None else {"clock": clock}
    return CudaIpcTransport(chosen, arena, lambda token, alive: CudaShare(token, alive, made), **clocks)


def device(root: str, **options: Any) -> Transport:
    """Run with a device that is memory of the host: its tensors are shared if possible, others use the arena."""
    path = device_path(_arena(root, **options), max_held_bytes=32 * MIB)
    path.get(Edge("a", "b"), "nothing: it says that it is there")
    return path


def without_device(root: str) -> Transport:
    return CudaIpcTransport(CudaIpcOptions(), _arena(root))


def _arena(root: str, **options: Any) -> ArenaOptions:
    image = {"block_bytes": 4096, "initial_bytes": MIB, "max_bytes": 96 * MIB, "inline_bytes": 4096}
    return small(root, image=image, **options)
