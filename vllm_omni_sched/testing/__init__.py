"""Build the real scheduler without weights: vLLM's own classes, with a model config that needs no model.

    from vllm_omni_sched.testing import make_item, make_request, make_scheduler, make_session_update, run_step

    scheduler = make_scheduler(OmniScheduler, max_num_batched_tokens=64, encoder_cache_size=32)
    scheduler.add_request(make_request("a", num_tokens=40, items=[make_item(4, 16, "cat"), make_item(20, 16, "dog")]))
    step = run_step(scheduler)                  # schedule(); under async scheduling the step is in flight now
    step.scheduled.scheduled_encoder_inputs     # {"a": [0, 1]}
    step.outputs                                # None: its update_from_output() comes with the next run_step()
    drain(scheduler)                            # run until nothing is left, return every step

A streaming session is a resumable request, and each later chunk of it an update with the same id:

    scheduler.add_request(make_request("s", 4, [make_item(0, 4, "frame-0")], resumable=True, max_tokens=1))
    scheduler.add_request(make_session_update("s", 4, [make_item(0, 4, "frame-1")], max_tokens=1))
    scheduler.add_request(make_session_update("s", last=True))      # no more input: the session may finish

Nothing is read from disk and no model code is imported, so it runs on every supported vLLM, with or without compiled
operators. `scheduler_cls=None` builds the scheduler that vLLM itself would choose.
"""

from vllm_omni_sched.testing.config import make_vllm_config
from vllm_omni_sched.testing.requests import END_TOKEN, make_data, make_item, make_request, make_session_update
from vllm_omni_sched.testing.scheduler import make_scheduler
from vllm_omni_sched.testing.steps import Step, drain, make_runner_output, run_step, sample_by_position

__all__ = [
    "END_TOKEN",
    "Step",
    "drain",
    "make_data",
    "make_item",
    "make_request",
    "make_runner_output",
    "make_scheduler",
    "make_session_update",
    "make_vllm_config",
    "run_step",
    "sample_by_position",
]
