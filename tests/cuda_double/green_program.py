"""Free memory after a lane with a green context has ended: `python -m tests.cuda_double.green_program`.

Each of `ENDINGS` is tried in a forked process, which ends as Python does. The status of each is printed; a process that
a signal has ended has a negative one.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
from types import SimpleNamespace

import torch

from tests.cuda_double import control, kernels
from vllm_omni_sched.lanes import CudaDevice, Job, StreamLane
from vllm_omni_sched.lanes.cuda import green_context

SIZE = 1 << 16
ENDINGS = {
    "kept": ("device", "pinned"),
    "destroyed, device memory": ("device",),
    "destroyed, pinned memory": ("pinned",),
}
"""Names what happens to the context when its lane has ended, with the kinds of memory that are freed afterwards."""
left: list[torch.Tensor] = []
"""Keeps memory until Python ends and frees it."""


def use_and_free(memory: str) -> None:
    """Let a lane use memory, end it, and free some of the memory; leave the rest."""
    device = CudaDevice(torch.device("cuda", 0), 16)

    def work(payload: torch.Tensor, pause: object) -> torch.Tensor:
        if payload.is_cuda:
            payload.record_stream(torch.cuda.current_stream())
        return payload.to("cuda", non_blocking=True) * 2

    lane = StreamLane(work, device=device)
    payloads = [torch.full((SIZE,), 3.0).pin_memory() for _ in range(2)]
    if memory == "device":
        payloads = [payload.cuda() for payload in payloads]
    for number in range(2):
        assert lane.submit(Job(str(number), payloads[number]))
    assert lane.drain(20.0)
    results = [done.result for done in lane.poll()]
    assert [float(result.sum().cpu()) for result in results] == [6.0 * SIZE] * 2
    lane.close(20.0)
    del lane, device
    green_context.cache_clear()
    gc.collect()
    left.extend((payloads.pop(), results.pop()))
    payloads.clear()
    results.clear()
    torch.cuda.empty_cache()


def main() -> None:
    kernels.install()
    control.load_driver()
    torch.set_num_threads(1)
    torch.zeros(1, device="meta").mul(2)  # it imports much, and needs no device
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    gc.collect()
    gc.freeze()  # it is not looked at again in each process
    statuses = {}
    for ending, memories in ENDINGS.items():
        pid = os.fork()
        if not pid:
            if ending != "kept":  # a planted fault
                ctypes.pythonapi = SimpleNamespace(Py_IncRef=lambda context: None)  # type: ignore[assignment]
            for memory in memories:
                use_and_free(memory)
            return
        statuses[ending] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(statuses)


if __name__ == "__main__":
    main()
