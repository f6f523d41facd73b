"""Compute on the processor, in stream order, what vLLM's model runner V2 launches by itself: for the CUDA double.

These stand for a kernel of Triton and for a compiled operator, below vLLM's own code that launches them. All others are
left as they are without Triton: whoever launches one fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.worker.gpu import buffer_utils

from tests.cuda_double.kernels import launch

Compute = Callable[[list[torch.Tensor]], None]


class _Pinned:
    """Offers pinned memory to torch as memory of a device, under the same address, and keeps it."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.__cuda_array_interface__ = {**memory.numpy().__array_interface__, "version": 2}


def _view_of_pinned_memory(cpu_tensor: torch.Tensor) -> torch.Tensor:
    assert cpu_tensor.is_pinned()
    return torch.as_tensor(_Pinned(cpu_tensor), device="cuda")


class _WriteRows:
    """Writes stretches of numbers into the rows of a tensor, as `_apply_write_kernel` does for one tensor."""

    def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
        return self._write

    @staticmethod
    def _write(
        output: torch.Tensor,
        row_stride: int,
        rows: torch.Tensor,
        starts: torch.Tensor,
        contents: torch.Tensor,
        ends: torch.Tensor,
        groups: None,
        *,
        BLOCK_SIZE: int,
        MULTI_GROUP: bool,
    ) -> None:
        assert not MULTI_GROUP, "there is one group of KV blocks here"

        def compute(seen: list[torch.Tensor]) -> None:
            memory, row_of, start_of, content, end_of = seen
            flat, first = memory.view(-1), 0
            for row, start, end in zip(row_of.tolist(), start_of.tolist(), end_of.tolist(), strict=True):
                at = row * row_stride + start
                flat[at : at + end - first] = content[first:end]
                first = end

        launch(torch.device("cuda", 0), [output, rows, starts, contents, ends], compute)


def install() -> None:
    """Put them in the place of those that are missing."""
    module: Any = buffer_utils
    module.get_accelerator_view_from_cpu_tensor = _view_of_pinned_memory
    module._apply_write_kernel = _WriteRows()
