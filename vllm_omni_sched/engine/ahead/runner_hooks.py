"""Hooks of encode-ahead and of shared encodings in the model runners, V1 and V2."""

from functools import partial
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput

from vllm_omni_sched.engine.ahead.halves import sharing_half, worker_half
from vllm_omni_sched.engine.ahead.warm_up import dummy_batches
from vllm_omni_sched.engine.lending.pages import kv_pages_of
from vllm_omni_sched.engine.shared.weights import digest_of_encoder
from vllm_omni_sched.resource.engine.lane import IDLE_STEP_SECONDS


def start_lane(runner: Any) -> Any:
    """Start the lane once the model is loaded, and return the worker half; None when encode-ahead is off.

    The worker half of shared encodings gets access to the weights.
    """
    sharing = sharing_half()
    if sharing is not None:
        sharing.digest = lambda: digest_of_encoder(runner.get_model())
    ahead = worker_half()
    if ahead is not None:
        ahead.kv_pages = partial(kv_pages_of, runner)
        ahead.start(runner.get_model(), runner.device, partial(dummy_batches, runner))
    return ahead


def wait_when_idle(ahead: Any, scheduler_output: SchedulerOutput) -> None:
    """Wait briefly for an encode in a step without tokens: otherwise the next empty step would follow at once."""
    orders = scheduler_output.ec_connector_metadata  # None in the steps of a warm-up
    if orders is not None and orders.pending and not scheduler_output.total_num_scheduled_tokens:
        ahead.wait(IDLE_STEP_SECONDS)


def keep_what_is_freed(ahead: Any, scheduler_output: SchedulerOutput, encoder_cache: Any) -> None:
    """Copy encodings to host memory, as ordered, before vLLM frees them. ``encoder_cache``: mm_hash -> tensor."""
    orders = scheduler_output.ec_connector_metadata if ahead is not None else None
    if orders is not None:
        ahead.host.before_frees(orders.host, encoder_cache)


def forget_encodings(worker: Any = None) -> None:
    """Drop all encodings of this worker, and wait until no lane works with its weights, which are about to change."""
    ahead = worker_half()
    if ahead is not None:
        ahead.forget()
