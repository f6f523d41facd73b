"""Kernels for the CUDA double: operations of torch, computed by the processor when their turn in the stream comes.

At a launch the results are allocated, and addresses are noted; nothing is read. When the operation runs, it sees the
memory behind these addresses as it is then, as a kernel does: memory that has been used for something else gives wrong
values, and memory that was freed is an illegal access. An operation that is not in `OPERATIONS` is refused by the
runtime, by the name of its kernel.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import itertools
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from tests.cuda_double.control import holding_all, runtime

OPERATIONS = (
    "add.Tensor",
    "add_.Tensor",
    "sub.Tensor",
    "sub_.Tensor",
    "__rshift__.Scalar",
    "clamp_",
    "stack",
    "flip",
    "mul.Tensor",
    "mul_.Tensor",
    "div.Tensor",
    "div_.Tensor",
    "eq.Tensor",
    "eq.Scalar",
    "fill_.Scalar",
    "zero_",
    "cat",
    "gather",
    "index.Tensor",
    "index_select",
    "index_copy_",
    "index_put_",
    "masked_scatter_",
    "normal_",
    "mm",
    "sum.dim_IntList",
    "sum",
    "mean",
    "all",
    "_upsample_bicubic2d_aa",  # with `round_`, what video processors need beside the above
    "round_",
)
"""Operations by the names of their overloads."""
BY_BYTES = "copy_"
"""Runs by torch's own code, except for copies that need a kernel."""

_TORCHS_OWN = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)  # one function copies between all devices
_Kernel = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_long, ctypes.POINTER(ctypes.c_void_p))


@dataclass(frozen=True)
class Place:
    """A tensor on a device, by its address: the tensor itself is not kept."""

    address: int
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Place:
        extent = 0
        if tensor.numel():
            extent = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        num_bytes = extent * tensor.element_size()
        return cls(tensor.data_ptr(), num_bytes, tensor.dtype, tuple(tensor.shape), tensor.stride())

    def seen_at(self, content: int | None) -> torch.Tensor:
        """Return the tensor over the memory that is behind its address."""
        if not self.num_bytes:
            return torch.empty(self.shape, dtype=self.dtype)
        memory = (ctypes.c_char * self.num_bytes).from_address(content or 0)
        flat = torch.frombuffer(memory, dtype=torch.uint8).view(self.dtype)
        return flat.as_strided(self.shape, self.stride)


_launched: dict[int, tuple[list[Place], Callable[[list[torch.Tensor]], None]]] = {}
_tickets = itertools.count(1)
errors: list[str] = []
"""Tracebacks of kernels that failed, as a device would say in its log."""


@_Kernel
def _run(ticket: int, content: Any) -> int:
    """Run one kernel in the thread of its stream."""
    places, compute = _launched.pop(ticket)
    if not content:
        return 0
    collects = gc.isenabled()
    gc.disable()  # what it freed might have to wait for this stream
    try:
        with torch.no_grad():
            compute([place.seen_at(content[index]) for index, place in enumerate(places)])
        return 0
    except Exception:  # noqa: BLE001 - it is told to the owner as a device tells it
        errors.append(traceback.format_exc())
        return 1
    finally:
        if collects:
            gc.enable()


def order_of_kernels(low: torch.cuda.Stream, high: torch.cuda.Stream, each: int) -> list[str]:
    """Return the order in which so many kernels of each of two streams run that were all launched before: their names.

    Those of ``low`` were launched first.
    """
    order: list[str] = []
    with holding_all():
        for stream, name in ((low, "low"), (high, "high")):
            with torch.cuda.stream(stream):
                for _ in range(each):
                    launch(torch.device("cuda", 0), [], lambda _, name=name: order.append(name))
    torch.cuda.synchronize()
    return order


def launch(device: torch.device, tensors: list[torch.Tensor], compute: Callable[[list[torch.Tensor]], None]) -> None:
    """Run a function over tensors of a device when its turn in the current stream comes."""
    places, ticket = [Place.of(tensor) for tensor in tensors], next(_tickets)
    addresses = (ctypes.c_void_p * len(places))(*(place.address for place in places))
    sizes = (ctypes.c_size_t * len(places))(*(place.num_bytes for place in places))
    stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
    _launched[ticket] = places, compute
    with torch.cuda.device(device):
        error = runtime().cuda_double_launch(stream, _run, ctypes.c_long(ticket), len(places), addresses, sizes)
    if error:
        del _launched[ticket]
        runtime().cudaGetLastError()  # the check behind a real launch takes it away from this thread, too
        torch.cuda.check_error(error)


def _like(value: Any) -> Any:
    """Return a tensor without content in place of one on a device."""
    if not isinstance(value, torch.Tensor) or not value.is_cuda:
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _operation(op: Any) -> Callable[..., Any]:
    written = {
        argument.name for argument in op._schema.arguments if argument.alias_info and argument.alias_info.is_write
    }
    names = [argument.name for argument in op._schema.arguments]

    def launched(*args: Any, **kwargs: Any) -> Any:
        flat, spec = tree_flatten((args, kwargs))
        given = [value for value in flat if isinstance(value, torch.Tensor)]
        device = next(tensor.device for tensor in given if tensor.is_cuda)
        if written:
            named = dict(zip(names, args, strict=False)) | kwargs
            results = [named[name] for name in names if name in written]
        else:
            meta_args, meta_kwargs = tree_unflatten([_like(value) for value in flat], spec)
            shape = op(*meta_args, **meta_kwargs)
            results = [torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype, device=device)]
        on_device = [tensor for tensor in given if tensor.is_cuda]
        held = {id(value): value.clone() for value in given if not value.is_cuda}  # as it is at the launch
        order = {id(tensor): index for index, tensor in enumerate(on_device)}
        plan = [
            (order.get(id(value)), held.get(id(value)) if isinstance(value, torch.Tensor) else value) for value in flat
        ]

        def compute(seen: list[torch.Tensor]) -> None:
            values = [seen[index] if index is not None else value for index, value in plan]
            on_host, named_on_host = tree_unflatten(values, spec)
            result = op(*on_host, **named_on_host)
            if not written:
                seen[-1].copy_(result)

        launch(device, on_device if written else [*on_device, *results], compute)
        return results[0]

    return launched


def _copy_on_host(seen: list[torch.Tensor]) -> None:
    seen[1].copy_(seen[0])


def _copy(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copy by torch's own code where it moves bytes; by a kernel where it converts or strides on one device."""
    on_one = self.is_cuda and source.device == self.device
    if self.numel() and on_one and not _moves_bytes(self, source):
        launch(self.device, [source.expand_as(self), self], _copy_on_host)
        return self
    if self.numel() and self.is_cuda and source.is_cuda and not _moves_bytes(self, source):
        return self.copy_(source.contiguous().to(self.dtype).expand_as(self).contiguous().to(self.device))
    torch.ops.aten.copy_.default.redispatch(_TORCHS_OWN, self, source, non_blocking)
    return self


def _moves_bytes(self: torch.Tensor, source: torch.Tensor) -> bool:
    same = self.dtype == source.dtype and self.shape == source.shape
    return same and self.is_contiguous() and source.is_contiguous()


_libraries: list[torch.library.Library] = []


def install() -> None:
    """Give torch the operations of the double, in place of its kernels for CUDA. Idempotent."""
    if _libraries:
        return
    library = torch.library.Library("aten", "IMPL", "CUDA")
    _libraries.append(library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that each has a kernel already
        for name in OPERATIONS:
            packet, _, overload = name.partition(".")
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            library.impl(name, _operation(op), allow_override=True)
        library.impl(BY_BYTES, _copy, allow_override=True)
    atexit.register(_end)


def _end() -> None:
    """Let no kernel call Python while the interpreter ends."""
    runtime().cuda_double_end()
