"""The engine that pixel values on a device are handed to, as one of vLLM's engines in a process of its own.

vLLM sends tensors over a queue of torch.multiprocessing, which shares memory of a device by a handle of CUDA IPC.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.multiprocessing import get_context

from tests.cuda_double import control, kernels
from tests.support.pixel_levels import Levels, compare

PATIENCE_SECONDS = 120.0


class Received(NamedTuple):
    """Holds the answer of the engine's process about pixel values.

    Attributes:
        device: where they are.
        mapped: number of allocations of other processes that are mapped there.
        copies: number of copies that receiving them took.
        levels: how they differ from those of the host.
    """

    device: str
    mapped: int
    copies: int
    levels: Levels


class EngineSide:
    """A process that receives pixel values of a device."""

    def __init__(self) -> None:
        context = get_context("spawn")
        self._values, self._answers = context.Queue(), context.Queue()
        self._process = context.Process(target=_receive, args=(self._values, self._answers), daemon=True)
        self._process.start()

    def receive(self, values: torch.Tensor, expected: torch.Tensor, deviation: list[float], file: Path) -> Received:
        """Hand over pixel values of a device; they are compared there with those of the host, and written to a file.

        Args:
            deviation: by which they are normalised.
        """
        self._values.put((values, expected.numpy(), deviation, str(file)))
        found: Received = self._answers.get(timeout=PATIENCE_SECONDS)
        return found

    def close(self) -> None:
        torch.cuda.ipc_collect()  # what has been received is released
        self._values.put(None)
        self._process.join(PATIENCE_SECONDS)
        assert self._process.exitcode == 0


@contextmanager
def engine_side() -> Iterator[EngineSide]:
    side = EngineSide()
    try:
        yield side
    finally:
        side.close()


def _receive(values: Queue[Any], answers: Queue[Any]) -> None:
    kernels.install()
    torch.set_num_threads(1)
    before = control.counts().copies
    while (given := values.get()) is not None:
        tensor, expected, deviation, file = given
        torch.cuda.synchronize(tensor.device)
        now = control.counts()
        device, mapped, copies = str(tensor.device), int(now.opened - now.closed), int(now.copies - before)
        host = tensor.cpu()
        before = control.counts().copies
        del given, tensor
        torch.cuda.ipc_collect()
        np.save(file, host.numpy())
        answers.put(Received(device, mapped, copies, compare(host, torch.from_numpy(expected), deviation)))
