"""Run one engine step without a model: `schedule()`, a made-up model output, `update_from_output()`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

Sampler = Callable[[Request, int], int]
"""Function that returns the token that `request` samples at the (0-based) output position."""

_in_flight: WeakKeyDictionary[Scheduler, tuple[SchedulerOutput, ModelRunnerOutput]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Step:
    """Result of one `run_step`.

    `scheduled`: the output of `schedule()`. `outputs`: the engine outputs, by client index, of the step that finished
    in it (under async scheduling the one before), None if none finished.
    """

    scheduled: SchedulerOutput
    outputs: dict[int, Any] | None


def sample_by_position(request: Request, position: int) -> int:
    """Return a token that depends on the request's id and the position, never the end token; the default sampler."""
    return 1000 + (hash_of(request.request_id) + 31 * position) % 499


def hash_of(text: str) -> int:
    """Return a hash of `text` that is the same in every process."""
    return sum((index + 1) * byte for index, byte in enumerate(text.encode()))


def run_step(scheduler: Scheduler, sampled: Sampler | Mapping[str, int] = sample_by_position) -> Step:
    """Schedule one step and finish one.

    With async scheduling one step stays in flight, as in the engine: step k + 1 is scheduled before the output of
    step k arrives. A step without tokens is finished at once, after the one in flight. `sampled` is a function, or a
    mapping of request ids to the token that each samples in this step.
    """
    sampler = _as_sampler(sampled)
    scheduled = scheduler.schedule()
    output = make_runner_output(scheduler, scheduled, sampler)
    in_flight = _in_flight.pop(scheduler, None)
    outputs = scheduler.update_from_output(*in_flight) if in_flight else None
    if scheduler.scheduler_config.async_scheduling and scheduled.total_num_scheduled_tokens:
        _in_flight[scheduler] = (scheduled, output)
        return Step(scheduled, outputs)
    last = scheduler.update_from_output(scheduled, output)
    if outputs is None:
        return Step(scheduled, last)
    for client, more in last.items():
        if client in outputs:
            outputs[client].outputs.extend(more.outputs)
        else:
            outputs[client] = more
    return Step(scheduled, outputs)


def drain(scheduler: Scheduler, sampled: Sampler = sample_by_position, *, max_steps: int = 10_000) -> list[Step]:
    """Run until no request can continue and nothing is in flight. Raises `RuntimeError` after `max_steps`."""
    steps: list[Step] = []
    while scheduler.has_unfinished_requests() or scheduler in _in_flight:
        if len(steps) == max_steps:
            raise RuntimeError(f"still {len(scheduler.requests)} requests after {max_steps} steps")
        steps.append(run_step(scheduler, sampled))
    return steps


def make_runner_output(scheduler: Scheduler, scheduled: SchedulerOutput, sampler: Sampler) -> ModelRunnerOutput:
    """Return the model runner's output for this step.

    Each request that has reached its last known token gets one token, a prefill that is not finished gets none.
    """
    req_ids = list(scheduled.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=req_ids,
        req_id_to_index={req_id: index for index, req_id in enumerate(req_ids)},
        sampled_token_ids=[_sampled(scheduler.requests[req_id], sampler) for req_id in req_ids],
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )


def _sampled(request: Request, sampler: Sampler) -> list[int]:
    # Called right after schedule(): the counters include this step, under async scheduling also its placeholder.
    if request.is_prefill_chunk:
        return []
    position = request.num_output_tokens + max(request.num_output_placeholders - 1, 0)
    return [sampler(request, position)]


def _as_sampler(sampled: Sampler | Mapping[str, int]) -> Sampler:
    if isinstance(sampled, Mapping):
        return lambda request, position: sampled.get(request.request_id, sample_by_position(request, position))
    return sampled
