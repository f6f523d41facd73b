"""Where encoder work runs beside the LLM, on the same device.

A lane takes jobs one after another and never blocks its owner: `submit`, later `poll`.

- `ThreadLane`: a thread of this process.
- `ProcessLane`: a forked process, with the memory of this one; Linux.
"""

from vllm_omni_sched.lanes.base import Done, Job, Lane, Work
from vllm_omni_sched.lanes.process import ProcessLane
from vllm_omni_sched.lanes.thread import ThreadLane

__all__ = ["Done", "Job", "Lane", "ProcessLane", "ThreadLane", "Work"]
