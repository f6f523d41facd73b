"""One end of each variant: put a tensor that is on the device, get one that is on the device."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.gpu.ipc import THEIRS
from vllm_omni_sched.connectors.arena import ArenaOptions, ArenaTransport
from vllm_omni_sched.connectors.cuda_ipc import CudaIpcOptions, CudaIpcTransport
from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.framing import make_message
from vllm_omni_sched.connectors.transport import Transport

HELD_BYTES = 8 << 30


class PathEnd:
    """End of one of our transports."""

    def __init__(self, path: Transport, device: str) -> None:
        self._path, self._device = path, device

    def put(self, edge: tuple[str, str], key: str, tensor: torch.Tensor) -> None:
        self._path.put(make_message(Edge(*edge), key, {"x": tensor}))

    def get(self, edge: tuple[str, str], key: str) -> torch.Tensor | None:
        arrival = self._path.get(Edge(*edge), key)
        return None if arrival is None else arrival.open()["x"].to(self._device)

    def facts(self) -> dict[str, Any]:
        facts = self._path.health().facts
        return {name: value for name, value in facts.items() if name.startswith("device_")}

    def close(self) -> None:
        self._path.close()


class TheirEnd:
    """End of vLLM-Omni's own connector."""

    def __init__(self, device: str) -> None:
        from vllm_omni.distributed.omni_connectors.connectors.shm_connector import SharedMemoryConnector

        self._connector, self._device = SharedMemoryConnector({"stage_id": 0}), device

    def put(self, edge: tuple[str, str], key: str, tensor: torch.Tensor) -> None:
        if not self._connector.put(*edge, key, {"x": tensor})[0]:
            raise RuntimeError(f"{THEIRS} did not take a message of {tensor.nbytes} bytes")

    def get(self, edge: tuple[str, str], key: str) -> torch.Tensor | None:
        found = self._connector.get(*edge, key)
        return None if found is None else found[0]["x"].to(self._device)

    def facts(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self._connector.close()


def make(variant: str, device: str, directory: str, run: str) -> PathEnd | TheirEnd:
    """Raises what a variant raises that this machine cannot run."""
    if variant == THEIRS:
        return TheirEnd(device)
    pool = {"block_bytes": 16 << 10, "initial_bytes": 64 << 20, "max_bytes": 8 << 30}
    name = f"{run}-{''.join(filter(str.isalnum, variant))}"
    arena = ArenaOptions.model_validate({"directory": directory, "arena": name, "modality": "image", "image": pool})
    if variant == "arena":
        return PathEnd(ArenaTransport(arena), device)
    options = CudaIpcOptions(min_bytes=1, max_held_bytes=HELD_BYTES, copy_out=not variant.endswith("views"))
    return PathEnd(CudaIpcTransport(options, arena), device)
