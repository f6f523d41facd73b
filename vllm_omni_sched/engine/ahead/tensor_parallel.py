"""The ranks of an engine with tensor parallelism: what their lanes know of each other, and their tensor-parallel group.

A lane's process is forked from its worker, so that the encoder in it would use the worker's tensor-parallel group. Its
calls would mix with those of the steps, and its threads and shared memory do not work after a fork. So the process puts
an `EncoderGroup` in its place.
"""

import secrets
from typing import Any, NamedTuple

import torch

from vllm_omni_sched import compat
from vllm_omni_sched.lanes import LaneGroup, join_group
from vllm_omni_sched.lanes.processors import bound_here


class Join(NamedTuple):
    """Payload of the first job of a lane's process: join the other ranks, then warm the encoder up."""

    generation: int


class Ranks(NamedTuple):
    """The ranks that encode together, as one of them sees them.

    ``bound``: processors that the LLM's threads are bound to, on all ranks.
    """

    secret: str
    rank: int
    size: int
    bound: frozenset[int]

    def join(self, generation: int) -> LaneGroup:
        """Connect this process, a lane's, to those of the other ranks; raises `LaneGroupError`."""
        return join_group(self.secret, generation, self.rank, self.size)


def ranks_here() -> Ranks:
    """Return the ranks of this worker's tensor-parallel group. Every worker of the group must call this at once."""
    group = compat.tensor_parallel_group()
    told: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(told, (secrets.token_hex(16), sorted(bound_here())), group=group.cpu_group)
    bound = frozenset(cpu for _, cpus in told for cpu in cpus)
    return Ranks(told[0][0], group.rank_in_group, group.world_size, bound)


class EncoderGroup:
    """What encoders use of vLLM's tensor-parallel group (`GroupCoordinator`), over the connections between lanes.

    The results do not depend on the rank. Other attributes of vLLM's group are missing: an encoder that uses one fails
    in its warm-up, and encode-ahead then stops.
    """

    def __init__(self, group: LaneGroup, original: Any) -> None:
        self._group = group
        self.world_size, self.rank_in_group = group.size, group.rank
        self.rank, self.local_rank, self.ranks = original.rank, original.local_rank, list(original.ranks)
        self.is_first_rank, self.is_last_rank = group.rank == 0, group.rank == group.size - 1
        self.device_group = _DeviceGroup(group)

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks."""
        return self._group.sum(input_)

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Return the tensors of all ranks, one behind the other in this dimension."""
        return torch.cat(self._group.exchange(input_), dim)

    def gather(self, input_: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        """Return what `all_gather` returns at rank ``dst`` of the group, and None at the others."""
        gathered = self.all_gather(input_, dim)
        return gathered if self.rank_in_group == dst else None

    def reduce_scatter(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Return this rank's part, in this dimension, of the sum over all ranks."""
        return self.all_reduce(input_).chunk(self.world_size, dim)[self.rank_in_group].contiguous()

    def broadcast(self, input_: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Copy the tensor of rank ``src`` of the group into ``input_``, and return it."""
        return input_.copy_(self._group.exchange(input_)[src])


class _DeviceGroup:
    """What encoders pass to functions of `torch.distributed`, with the methods of a `ProcessGroup` that these call."""

    def __init__(self, group: LaneGroup) -> None:
        self._group = group

    def rank(self) -> int:
        return self._group.rank

    def size(self) -> int:
        return self._group.size

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any = None) -> None:
        for found, own in zip(outputs, inputs, strict=True):
            for into, part in zip(found, self._group.exchange(own), strict=True):
                into.copy_(part)

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> None:
        if options is not None and options.reduceOp != torch.distributed.ReduceOp.SUM:
            raise NotImplementedError(f"lanes of several ranks add tensors up, and do not support {options.reduceOp}")
        for tensor in tensors:
            tensor.copy_(self._group.sum(tensor))


def why_not_together(modules: Any) -> str | None:
    """Return why these modules of an encoder cannot run in the lanes of several ranks; None if no reason is known."""
    kinds = (torch.distributed.ProcessGroup, type(compat.tensor_parallel_group()))
    for module in modules:
        for name, value in vars(module).items():
            if isinstance(value, kinds):
                return (
                    f"{type(module).__qualname__}.{name} of its encoder is a process group of the worker, which the "
                    "lane cannot use"
                )
    return None
