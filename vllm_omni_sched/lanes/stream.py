"""A lane that is a side stream of the owner's own device."""

import contextlib
import traceback
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vllm_omni_sched.lanes.base import Done, Job, Pause, Work
from vllm_omni_sched.lanes.thread import ThreadLane

if TYPE_CHECKING:
    import torch

    from vllm_omni_sched.lanes.cuda import CudaDevice


LAUNCHED_AHEAD = 16
"""A layer of a vision tower takes half a millisecond, and a thread keeps the interpreter for up to 5."""


class StreamLane(ThreadLane):
    """A thread lane that launches work on a stream of its own, slice by slice.

    1. A job is reported once the device has finished it. `submit`, `poll` and `cancel` never wait for the device.
    2. Work runs after what its owner had launched at `submit`; the owner's stream at `poll` runs after the results.
    3. With a share of 1, `LAUNCHED_AHEAD` slices are launched ahead of the running one, so that the device has work
       while another thread holds the interpreter. With less, the lane waits for each slice and rests in proportion to
       its time on the device, which includes waiting there for other work.
    4. A job that runs out of device memory fails alone, and its memory is freed.

    Kernels of the lane and its owner may run concurrently: they must not share scratch memory on the device.

    Args:
        work: as for every lane; it calls ``pause`` between its slices, for instance layers.
        capacity: as for every lane.
        device: the device of the stream.
    """

    def __init__(self, work: Work, capacity: int = 16, *, device: "CudaDevice") -> None:
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
        launched: deque[torch.cuda.Event] = deque()

        def end_slice() -> None:
            launched.append(self._device.mark())
            while len(launched) > (LAUNCHED_AHEAD if self._share >= 1.0 else 0):
                launched.popleft().synchronize()
            pause()

        try:
            result = self._work(payload.value, end_slice)
        except self._device.out_of_memory as error:
            traceback.clear_frames(error.__traceback__)  # the frames hold the memory that the work had allocated
            self._device.empty_cache()
            raise
        finally:
            end = self._device.mark()
            end.synchronize()
        return _Marked(end, result)


@dataclass(frozen=True)
class _Marked:
    mark: "torch.cuda.Event"
    value: Any
