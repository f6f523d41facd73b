"""An `Actor` whose tensors lie on a device of the CUDA double, shared by the driver that serves on GPUs."""

from __future__ import annotations

import contextlib
import os
import signal
import weakref
from typing import Any

import torch

from tests.cuda_double import kernels
from tests.cuda_double.control import counts, runtime, set_memory_bound
from tests.support.arena import EDGE
from tests.support.arena_actor import Actor
from tests.support.processes import serve
from vllm_omni_sched.connectors.arena import ArenaOptions
from vllm_omni_sched.connectors.cuda_ipc import CudaIpcOptions, CudaIpcTransport
from vllm_omni_sched.connectors.cuda_ipc.cuda import CudaShare
from vllm_omni_sched.connectors.cuda_ipc.driver import Exported, TorchCuda
from vllm_omni_sched.connectors.cuda_ipc.share import ShareReason
from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.framing import make_message

STAND_IN = "tests.support.host_device:HostDriver"
DRIVER = "vllm_omni_sched.connectors.cuda_ipc.driver:TorchCuda"


class CountingCuda(TorchCuda):
    """Counts the blocks whose memory there is, and those that are exported."""

    def __init__(self) -> None:
        self.alive = self.exported = 0

    def allocate(self, index: int, nbytes: int) -> torch.Tensor:
        block = super().allocate(index, nbytes)
        self.alive += 1
        weakref.finalize(block, self._one_less).atexit = False
        return block

    def _one_less(self) -> None:
        self.alive -= 1

    def export(self, block: torch.Tensor) -> Exported | ShareReason:
        exported = super().export(block)
        self.exported += not isinstance(exported, ShareReason)
        return exported

    def unexport(self, exported: Exported) -> None:
        super().unexport(exported)
        self.exported -= 1


class CudaActor(Actor):
    """Runs in a process, with its transport, its devices and the payloads it holds."""

    driver: CountingCuda

    def open_device(self, arena: dict[str, Any], names: list[str], **options: Any) -> None:
        """Use the devices ``host-0``, ``host-1``, …; both by default."""
        if names:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(name.removeprefix("host-") for name in names)
        kernels.install()
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
        self.driver = CountingCuda()
        chosen = CudaIpcOptions.model_validate({"min_bytes": 1, **options})
        arena_options = ArenaOptions.model_validate(arena)
        self.path = CudaIpcTransport(  # type: ignore[assignment]
            chosen, arena_options, lambda token, alive: CudaShare(token, alive, self.driver)
        )

    def put(self, key: str, nbytes: int, fill: int, edge: tuple[str, str] = EDGE) -> int:
        device = "cpu" if torch.cuda._is_in_bad_fork() else "cuda"  # there torch makes no tensor on a device
        tensor = torch.empty((1, nbytes), dtype=torch.uint8, device=device).fill_(fill)
        held_bytes = self.path.put(make_message(Edge(*edge), key, {"x": tensor}))
        tensor.fill_(255)  # it is the sender's again
        return held_bytes

    def get(self, key: str, hold: bool = False, name: str | None = None) -> tuple[int, int] | None:
        if not self.begin_get(name or key, key):
            return None
        host = torch.as_tensor(self.held[name or key]).cpu()
        if not hold:
            del self.held[name or key]
        self.path.reap()  # the device has finished with the block of the sender
        return host.numel(), int(host[0, 0]) if bool((host == host[0, 0]).all()) else -1

    def begin_get(self, name: str, key: str) -> bool:
        """Get a message and hold its tensor, without waiting for the device."""
        arrival = self.path.get(EDGE, key)
        if arrival is None:
            return False
        self.held[name] = arrival.open()["x"]
        return True

    def put_many(self, key: str, fills: list[int], nbytes: int) -> None:  # type: ignore[override]
        """Put one message with a tensor on each device, made on a side stream."""
        stream_of = [torch.cuda.Stream(index) for index in range(len(fills))]
        tensors = []
        with contextlib.ExitStack() as streams:
            for index, (stream, fill) in enumerate(zip(stream_of, fills, strict=True)):
                streams.enter_context(torch.cuda.stream(stream))
                tensors.append(torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{index}").fill_(fill))
            self.path.put(make_message(EDGE, key, {"x": tensors}))
            for tensor in tensors:
                tensor.fill_(255)

    def get_many(self, key: str) -> list[tuple[int, int]]:
        """Get a message on side streams; return the device and the value of each of its tensors."""
        side = [torch.cuda.Stream(index) for index in range(torch.cuda.device_count())]
        with contextlib.ExitStack() as streams:
            for stream in side:
                streams.enter_context(torch.cuda.stream(stream))
            arrival = self.path.get(EDGE, key)
            assert arrival is not None
            tensors = [torch.as_tensor(tensor) for tensor in arrival.open()["x"]]
            del arrival
            hosts = [tensor.cpu() for tensor in tensors]
        found = [
            (tensor.device.index, int(host[0]) if bool((host == host[0]).all()) else -1)
            for tensor, host in zip(tensors, hosts, strict=True)
        ]
        del tensors
        self.path.reap()
        return found

    def copy_and_drop(self, key: str) -> None:
        """Copy a held view on the device, and drop it at once."""
        view = torch.as_tensor(self.held.pop(key))
        self.held[f"copy of {key}"] = view.clone()

    def occupy(self, nbytes: int) -> None:
        self.held["occupied"] = torch.empty(nbytes, dtype=torch.uint8, device="cuda")

    def set_memory_bound(self, num_bytes: int) -> None:
        torch.cuda.empty_cache()
        set_memory_bound(num_bytes)

    def look(self, key: str) -> int:
        host = torch.as_tensor(self.held[key]).cpu()
        return int(host[0, 0]) if bool((host == host[0, 0]).all()) else -1

    def checksum(self, name: str) -> tuple[int, int]:
        """Return the device of a held tensor, and the sum of its bytes."""
        tensor = torch.as_tensor(self.held[name])
        return tensor.device.index, int(tensor.cpu().long().sum())

    def blocks(self) -> tuple[int, int]:
        """Blocks whose memory there is, and those that are shared."""
        return self.driver.alive, self.driver.exported

    def die_at(self, where: str, after: bool = False, by: int = signal.SIGKILL) -> None:
        super().die_at(where.replace(STAND_IN, DRIVER), after, by)

    def hold_device(self, whether: bool) -> None:
        """Stop or continue all devices of this process."""
        runtime().cuda_double_hold_all(int(whether))

    def allocated(self) -> int:
        return torch.cuda.memory_allocated()

    def mapped(self) -> int:
        """Return how many allocations of other processes are mapped here."""
        found = counts()
        return int(found.opened - found.closed)

    def forget_events(self) -> None:
        """Receive as a driver would that does not wait for the sender's event: a planted fault."""
        real = TorchCuda.map
        self.driver.map = lambda index, exported, keep: real(  # type: ignore[method-assign]
            self.driver, index, exported._replace(event=b""), keep
        )

    def forget_copies(self) -> None:
        """Give a block back before the copy of it has ended: a planted fault."""

        class Ended:
            def query(self) -> bool:
                return True

        self.driver.record = lambda index: Ended()  # type: ignore[method-assign]

    def cuda_in_a_fork(self) -> str:
        """Return what a forked child is told that uses the device."""
        reading, writing = os.pipe()
        if not (pid := os.fork()):
            try:
                torch.zeros(1, device="cuda")
                told = "it went well"
            except RuntimeError as error:
                told = str(error)
            os.write(writing, told.encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            told = pipe.read()
        os.waitpid(pid, 0)
        return told


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(CudaActor)
