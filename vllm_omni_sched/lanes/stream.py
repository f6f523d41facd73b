"""A lane that is a side stream of the owner's own device."""

import contextlib
import traceback
from collections import deque
from dataclasses import dataclass, replace
from typing import Any, Protocol

from vllm_omni_sched.lanes.base import Done, Job, Pause, Work
from vllm_omni_sched.lanes.thread import ThreadLane


class Mark(Protocol):
    """A point in the order of a stream."""

    def query(self) -> bool:
        """Whether the device is past it."""

    def synchronize(self) -> None:
        """Until the device is past it, the interpreter lock released."""


class StreamDevice(Protocol):
    """What a `StreamLane` asks of a device. *Current stream* is that of the calling thread."""

    out_of_memory: type[BaseException]

    def lane_stream(self) -> contextlib.AbstractContextManager[None]:
        """Makes the lane's stream the current one of this thread."""

    def mark(self) -> Mark:
        """A mark behind all that went to the current stream."""

    def follow(self, mark: Mark, tensors: Any) -> None:
        """What goes to the current stream from now on comes after ``mark``.

        Memory of ``tensors`` (any nest of tuples, lists and dicts), once freed, is not used again before the current
        stream is done with it. The device waits; the caller does not.
        """

    def empty_cache(self) -> None:
        """Give memory back that is kept for reuse."""


class StreamLane(ThreadLane):
    """A thread that launches work on a stream of its own, slice by slice.

    1. A job is reported once the device has done it. `submit`, `poll` and the rest never wait for the device.
    2. Work sees what its owner had launched at `submit`; the owner's stream of `poll` sees the results.
    3. At the whole share, one slice is launched ahead of the one that runs. At less, each slice is
       waited for, its time on the device included what it waited there for others, and the lane rests in proportion.
    4. Work that runs out of device memory fails alone, and its memory is given back.

    Kernels of the lane and its owner may run at once: they must not share scratch memory on the device.

    Args:
        work: as for every lane; it calls ``pause`` between its slices, layers say.
        capacity: as for every lane.
        device: whose stream; `CudaDevice` in real life.
    """

    def __init__(self, work: Work, capacity: int = 16, *, device: StreamDevice) -> None:
        self._device = device
        super().__init__(work, capacity)

    def submit(self, job: Job) -> bool:
        return super().submit(replace(job, payload=_Marked(self._device.mark(), job.payload)))

    def poll(self) -> list[Done]:
        return [self._handed_over(done) for done in super().poll()]

    def _handed_over(self, done: Done) -> Done:
        if done.error is not None:
            return done
        self._device.follow(done.result.mark, done.result.value)
        return replace(done, result=done.result.value)

    def _surroundings(self) -> contextlib.AbstractContextManager[None]:
        return self._device.lane_stream()

    def _do(self, payload: "_Marked", pause: Pause) -> "_Marked":
        self._device.follow(payload.mark, ())  # the payload itself outlives the job
        launched: deque[Mark] = deque()

        def end_slice() -> None:
            launched.append(self._device.mark())
            while len(launched) > (self._share >= 1.0):
                launched.popleft().synchronize()
            pause()

        try:
            result = self._work(payload.value, end_slice)
        except self._device.out_of_memory as error:
            traceback.clear_frames(error.__traceback__)  # they hold what the work had allocated
            self._device.empty_cache()
            raise
        finally:
            end = self._device.mark()
            end.synchronize()
        return _Marked(end, result)


@dataclass(frozen=True)
class _Marked:
    mark: Mark
    value: Any
