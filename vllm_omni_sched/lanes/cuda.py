"""CUDA for `StreamLane`: a stream and its events, and, if torch supports it, a part of the multiprocessors."""

import contextlib
import ctypes
import functools
import importlib
from collections.abc import Iterator
from typing import Any

import torch

from vllm_omni_sched.config.errors import LaneError


class CudaDevice:
    """Wraps a CUDA device with a side stream of the lowest priority.

    The default stream has that priority, too. For the lane to yield launch by launch, the owner has to run on a
    stream of higher priority, and to capture its graphs there: their nodes keep the priority of the capture.

    Args:
        device: a CUDA device.
        num_sms: streaming multiprocessors that the lane may use, as a green context; the driver rounds it up to a
            number that it can split off. None for all.

    Raises:
        LaneError: this is not a CUDA device, or ``num_sms`` is given and not supported.
    """

    out_of_memory: type[BaseException] = torch.OutOfMemoryError

    def __init__(self, device: torch.device, num_sms: int | None = None) -> None:
        if device.type != "cuda" or not torch.cuda.is_available():
            raise LaneError(f"a stream lane needs a CUDA device, got {str(device)!r}")
        self._device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        if num_sms is None:
            lowest, _ = torch.cuda.Stream.priority_range()
            self._stream: Any = torch.cuda.Stream(self._device, priority=lowest)
        else:
            self._stream = green_context(num_sms, self._device).Stream()

    @contextlib.contextmanager
    def lane_stream(self) -> Iterator[None]:
        """Make the lane's stream, and with it its part of the device, the current one of this thread."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield

    def mark(self) -> torch.cuda.Event:
        """Record an event on the current stream and return it; waiting for it lets the processor sleep."""
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def follow(self, mark: Any, tensors: Any) -> None:
        """Make all later work on the current stream wait for ``mark``; the device waits, the caller does not.

        Memory of ``tensors`` (nested tuples, lists and dicts), once freed, is not reused before the current stream
        is done with it.
        """
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(mark)
        for tensor in _tensors_in(tensors):
            if tensor.is_cuda:
                tensor.record_stream(stream)

    def empty_cache(self) -> None:
        """Return the unused memory of torch's allocator to the device, for all streams."""
        torch.cuda.empty_cache()


@functools.cache
def green_context(num_sms: int, device: torch.device) -> Any:
    """Return a part of a device, to be used through the streams that it creates.

    It stays until the process ends: when torch frees memory that work on such a stream has used, pinned host memory
    too, it records an event there, and ends the process if the context is gone.

    Raises:
        LaneError: this torch, driver or device does not support green contexts, or not of this size.
    """
    why = f"torch {torch.__version__} has no green contexts with streams of their own"
    try:
        module = importlib.import_module("torch.cuda.green_contexts")
        # From torch 2.14 on, `create` alone says what is not supported.
        supported = getattr(module, "SUPPORTED", True)
        # Without such streams, work would run on the default one, whose memory the owner's work reuses.
        if supported and hasattr(module.GreenContext, "Stream"):
            context = module.GreenContext.create(num_sms=num_sms, device_id=device.index)
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(context))  # even when Python ends, tensors may go after it
            return context
    except ImportError:
        pass
    except RuntimeError as error:
        why = str(error).splitlines()[0]
    raise LaneError(
        f"the encoder lane cannot have {num_sms} multiprocessors of its own: {why}; "
        "choose another value of option 'expert.encode_lane_sms', or leave it out"
    )


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for member in value.values():
            yield from _tensors_in(member)
    elif isinstance(value, tuple | list):
        for member in value:
            yield from _tensors_in(member)
