"""One engine core without a model: a scheduler, its worker, and the steps in flight between them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import cache
from typing import Any

from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from tests.differential.settings import Settings
from tests.support.worker import Worker
from vllm_omni_sched import compat
from vllm_omni_sched.engine.sessions.registry import StrandedSessions
from vllm_omni_sched.testing import END_TOKEN, make_runner_output, make_scheduler
from vllm_omni_sched.testing.steps import sample_by_position


class Recorder:
    """Stands in for the publisher of KV events."""

    def __init__(self) -> None:
        self.batches: list[Any] = []

    def publish(self, batch: Any) -> None:
        self.batches.append(batch)

    def take(self) -> list[Any]:
        taken, self.batches = self.batches, []
        return [event for batch in taken for event in batch.events]


@dataclass(frozen=True)
class Candidate:
    """What runs a workload: a scheduler class (None: stock's) and what is set for it, `options` being ours."""

    scheduler_cls: type | None = None
    options: dict[str, Any] | None = None
    encoder_cache_manager_cls: str | None = None


STOCK = Candidate()


class Side:
    def __init__(self, settings: Settings, seed: int, candidate: Candidate) -> None:
        self.settings = settings
        self.seed = seed
        how = {**vars(candidate), "scheduler_cls": candidate.scheduler_cls or _stock(settings.async_scheduling)}
        self.scheduler = make_scheduler(**settings.scheduler_options(), **how)
        if settings.read_ahead:
            self.scheduler.num_prefill_lookahead = settings.read_ahead
        self.scheduler.kv_event_publisher = self.kv_events = Recorder()
        _fix_order_of_release(self.scheduler.encoder_cache_manager)
        self.worker = Worker(
            use_v2_model_runner=settings.use_v2_model_runner,
            separate_process=settings.worker_is_separate_process,
            expander=None if candidate.scheduler_cls is None else _receiver(settings.uses_mrope),
        )
        self.in_flight: deque[tuple[Any, Any]] = deque()
        self.finished_req_ids: list[str] = []
        self.added: set[str] = set()

    def add(self, request: Any) -> None:
        self.added.add(request.request_id)
        self.scheduler.add_request(request)

    def schedule(self) -> tuple[Any, Any]:
        """Call `schedule()`; return the message as the worker understood it, and what its model would answer."""
        output = self.scheduler.schedule()
        answer = make_runner_output(self.scheduler, output, self._sample)
        self.finished_req_ids += sorted(output.finished_req_ids)
        seen = self.worker.receive(output)
        self.in_flight.append((output, answer))
        return seen, answer

    def update(self) -> dict[int, Any]:
        """Hand the oldest answer in flight to the scheduler."""
        output, answer = self.in_flight.popleft()
        return self.scheduler.update_from_output(output, answer)

    def close(self) -> None:
        """Let go of what requests hold outside memory."""
        self.scheduler.finish_requests(list(self.scheduler.requests), RequestStatus.FINISHED_ABORTED)

    def reset_encoder_cache(self) -> None:
        self.scheduler.reset_encoder_cache()
        self.worker.reset_encoder_cache()

    def _sample(self, request: Any, position: int) -> int:
        token = sample_by_position(request, position)
        return END_TOKEN if (token * 7919 + self.seed) % 11 == 0 else token


@cache
def _stock(async_scheduling: bool) -> type:
    """vLLM's scheduler; where some versions lose sessions, or deliver tokens of an ended turn, it does as ours does
    (`test_stranded_sessions`)."""
    base = AsyncScheduler if async_scheduling else Scheduler
    if not compat.strands_preempted_sessions():
        return base

    class Stock(base):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.stranded = StrandedSessions()

        def _handle_stopped_request(self, request: Any) -> bool:
            return self.stranded.stopped(request, super()._handle_stopped_request)

        def _update_request_as_session(self, session: Any, update: Any) -> None:
            self.stranded.extend(self, super()._update_request_as_session, session, update)

        def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
            outputs = super().update_from_output(*args, **kwargs)
            self.stranded.put_back(self)
            return outputs

    return Stock


def _fix_order_of_release(manager: Any) -> None:
    """Before 0.23 a request's items are released in the order of a set built anew each time: arbitrary, so choose
    one."""
    if hasattr(EncoderCacheManager(1), "request_cached_ids"):
        return
    in_any_order, free = manager.get_cached_input_ids, manager.free

    def free_in_order(request: Any) -> None:
        index = getattr(manager, "request_cached_ids", {})
        if request.request_id in index:
            index[request.request_id] = sorted(index[request.request_id])
        free(request)

    manager.get_cached_input_ids = lambda request: sorted(in_any_order(request))
    manager.free = free_in_order


def _receiver(uses_mrope: bool) -> Any:
    from vllm_omni_sched.compat import strip_feature
    from vllm_omni_sched.engine.sessions.messages import SessionReceiver

    strip = strip_feature()
    return SessionReceiver(lambda feature: strip(feature, uses_mrope))
