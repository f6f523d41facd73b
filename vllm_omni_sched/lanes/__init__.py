"""Lanes, which run encoder work beside the LLM, on the same device.

A lane takes jobs one after another and never blocks its owner: `submit`, later `poll`.

- `ThreadLane`: a thread of this process, for work whose kernels share no scratch memory (those of vLLM on a CPU do).
- `StreamLane`: a thread that launches its work on a stream of its own, for devices that have streams; `CudaDevice`.
- `ProcessLane`: a forked process, with the memory of this one; Linux.
- `LanePool`: several such processes, for as many jobs at a time.
- `MemberLane`: such a process as a member of a `LaneGroup`, which runs each job together with those of other ranks.
- `InlineLane`: none; the owner waits.
"""

from vllm_omni_sched.lanes.base import Done, Job, Lane, Work
from vllm_omni_sched.lanes.cuda import CudaDevice
from vllm_omni_sched.lanes.group import LaneGroup, join_group
from vllm_omni_sched.lanes.inline import InlineLane
from vllm_omni_sched.lanes.pool import LanePool
from vllm_omni_sched.lanes.process import MemberLane, ProcessLane
from vllm_omni_sched.lanes.stream import StreamLane
from vllm_omni_sched.lanes.thread import ThreadLane

__all__ = [
    "CudaDevice",
    "Done",
    "InlineLane",
    "Job",
    "Lane",
    "LaneGroup",
    "LanePool",
    "MemberLane",
    "ProcessLane",
    "StreamLane",
    "ThreadLane",
    "Work",
    "join_group",
]
