"""Extend vLLM's scheduler by one object, to which the overridden methods delegate.

`engine.scheduler` overrides vLLM's methods in a line or two each and hands them over to a `SchedulerExtension`. It is
made of parts that can be used, and tested, alone, and neither it nor they import vLLM until they make one of its
objects. See docs/scheduler.md for the life of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from vllm_omni_sched import compat
from vllm_omni_sched.clock import monotonic_seconds
from vllm_omni_sched.engine.encoder.inputs import DecidesInputs, EncoderInputs
from vllm_omni_sched.engine.encoder.pending import PendingInputs
from vllm_omni_sched.engine.encoder.stuck import UnstuckInputs
from vllm_omni_sched.engine.protocols import Request, Scheduler
from vllm_omni_sched.engine.refusals import Refusals
from vllm_omni_sched.engine.sessions.registry import Sessions, StrandedSessions
from vllm_omni_sched.items import FeatureList, is_in_line
from vllm_omni_sched.logs import get_logger
from vllm_omni_sched.monitor.counts import SchedulerMetrics

if TYPE_CHECKING:
    from vllm_omni_sched.engine.metrics.bridge import MetricsPublisher
    from vllm_omni_sched.engine.steered import SteeredSteps

logger = get_logger(__name__)

STEPS_PER_SAMPLE = 16
"""Steps per sample of ``schedule_seconds``: reading the clock costs a tenth of a decode step."""


class SchedulerExtension:
    """Sessions, windows, pending inputs, policies and metrics of one scheduler.

    1. The items of a session become a `FeatureList` when it is added, which its updates extend. So do nested items,
       and the items of a request that begins behind a computed prefix. All other requests keep vLLM's own list:
       reading an item of a subclass costs twice as much, and vLLM reads each item some ten times.
    2. vLLM decides a step's encoder inputs on the items that overlap its tokens (`EncoderInputs`).
    3. Items that a worker has consumed are stripped by a frontier, and their raw data leaves memory; preemption and
       rewinds restore it.
    4. Workers are sent what is new in a session, not the whole session (`Sessions`).
    5. Which requests run, with how many tokens, and what is evicted is unchanged; only ``policies`` change it.

    Args:
        metrics: counts what the parts do.
        inputs: decides encoder inputs, and indexes items.
        sessions: the streaming sessions.
        refusals: requests that are answered with an error.
        sort_update: sorts the items of a session's update in place; returns whether they were out of order.
        pending: pending inputs of model runner V2; None for V1 and for vLLM before 0.33.
        policies: None if no option asks for any.
        index_all: whether the items of every request become a `FeatureList`.
        gives_back: whether workers must be sent stripped items again after a preemption (model runner V1).
        publisher: None without metrics.
        keepers: the scheduler halves of our connectors, which keep encodings outside of vLLM's encoder cache.
    """

    __slots__ = (
        "_gives_back",
        "_index_all",
        "_sort_update",
        "_unstuck",
        "_warned_idle",
        "_warned_unsorted",
        "deciding",
        "inputs",
        "keepers",
        "metrics",
        "pending",
        "policies",
        "publisher",
        "refusals",
        "sessions",
        "stranded",
    )

    def __init__(
        self,
        metrics: SchedulerMetrics,
        inputs: EncoderInputs,
        sessions: Sessions,
        refusals: Refusals,
        sort_update: Callable[[Any], bool],
        *,
        pending: PendingInputs | None = None,
        policies: SteeredSteps | None = None,
        index_all: bool = False,
        gives_back: bool = False,
        publisher: MetricsPublisher | None = None,
        keepers: Sequence[Any] = (),
    ) -> None:
        self.metrics = metrics
        self.inputs = inputs
        self.sessions = sessions
        self.refusals = refusals
        self.pending = pending
        self.policies = policies
        self.deciding: DecidesInputs = inputs if policies is None else policies
        self.stranded = StrandedSessions()
        self.publisher = publisher
        self.keepers = keepers
        self._sort_update = sort_update
        self._index_all = index_all
        self._gives_back = gives_back
        self._unstuck = inputs if isinstance(inputs, UnstuckInputs) else None
        self._warned_idle = False
        self._warned_unsorted = False

    # -- a step ------------------------------------------------------------

    def schedule(self, scheduler: Scheduler, schedule: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the output of vLLM's own ``schedule``, with messages about sessions that hold only what is new."""
        if self.refusals.refused:
            self.refusals.drop(scheduler)
        if self._unstuck is not None:
            schedule = partial(self._unstuck.schedule, scheduler, schedule)
        metrics = self.metrics
        metrics.steps += 1
        started = 0.0 if metrics.steps % STEPS_PER_SAMPLE else monotonic_seconds()
        if self.policies is None:
            output = schedule(*args, **kwargs)
        else:
            output = self.policies.schedule(schedule, *args, **kwargs)
        if self.sessions.ids:
            self.sessions.scheduled(output, scheduler.requests)
            if not output.total_num_scheduled_tokens:
                self._warn_of_idle_sessions(scheduler)
        if started:
            metrics.schedule_seconds.observe(monotonic_seconds() - started)
        return output

    def _warn_of_idle_sessions(self, scheduler: Any) -> None:
        """Say once for each time that sessions take all places, and other requests wait for one, which ones these are.

        Model runner V2 has a place for each session between its turns, so that vLLM starts no request in it.
        """
        idle, places = scheduler.num_waiting_for_streaming_input, getattr(scheduler, compat.admission_limit(scheduler))
        waiting = compat.waiting_requests(scheduler) if idle >= places else ()
        names = [one.request_id for one in waiting if one.status.name != "WAITING_FOR_STREAMING_REQ"]
        if names and not self._warned_idle:
            logger.warning(
                "Request %s and %d more wait until one of %d streaming sessions ends: sessions that wait for input "
                "take all places (max_num_seqs). Close sessions that are not used any more, or raise --max-num-seqs.",
                *(names[0], len(names) - 1, idle),
            )
        self._warned_idle = bool(names)

    def cached_requests(self, scheduler: Scheduler, data: Any, running_reqs: list[Any], resumed_reqs: list[Any]) -> Any:
        """Return vLLM's data about requests that workers know, with the items that runner V1 must be sent again."""
        restored = {}
        if self._gives_back and (resumed_reqs or scheduler.connector):
            # A running request is rewound only if its blocks failed to load; any other is preempted first.
            rewound = chain(resumed_reqs, running_reqs) if scheduler.connector else resumed_reqs
            restored = self._restore(rewound)
        sender = self.sessions.sender
        if sender is not None and data.req_ids:
            sender.note_running(data)
        if not restored:
            return data
        from vllm_omni_sched.engine.sessions.messages import with_restored

        return with_restored(data, restored)

    def _restore(self, requests: Iterable[Request]) -> dict[str, dict[int, Any]]:
        """Return the items that runner V1 must be sent again, because their requests were rewound to before stripped
        items.
        """
        restored = {}
        for request in requests:
            features = request.mm_features
            if not features or not isinstance(features, FeatureList):
                continue
            if features.is_behind(request.num_computed_tokens):
                restored[request.request_id] = back = features.rewind(request.num_computed_tokens)
                self.metrics.restored_items += len(back)
                if self.sessions.sender is not None:
                    self.sessions.sender.note_restored(request.request_id, features.frontier)
        return restored

    def updated(self, scheduler: Scheduler, scheduler_output: Any, outputs: dict[int, Any]) -> dict[int, Any]:
        """Record the results of a step, and return them with the errors of refused requests."""
        if self.stranded.requests:
            self.stranded.put_back(scheduler)
        if self.policies is not None:
            self.policies.observe(scheduler_output, outputs)
        return self.refusals.report(scheduler, outputs) if self.refusals.refused else outputs

    # -- a request's life --------------------------------------------------

    def admit(self, request: Request, requests: Mapping[str, Any]) -> None:
        """Take a new request, or an update of one of ``requests``, before vLLM does."""
        features = request.mm_features
        if request.request_id in requests:
            if len(features) > 1 and self._sort_update(request):
                self._warn_unsorted()
        elif request.resumable or (features and (self._index_all or not is_in_line(features))):
            if self.inputs.index(request):
                self._warn_unsorted()
            if request.resumable:
                self.sessions.begin(request)
        if self.policies is not None:
            self.policies.enter(request)

    def extend(self, scheduler: Scheduler, extend: Callable[[Any, Any], None], session: Any, update: Any) -> None:
        """Extend ``session`` by ``update`` with vLLM's own method ``extend``; without it if it is refused."""
        if self.refusals.refuse_long_update(session, update, scheduler.max_model_len):
            update = replace(update, prompt_token_ids=[], mm_features=None)
        self.stranded.extend(scheduler, extend, session, update)

    def _warn_unsorted(self) -> None:
        if not self._warned_unsorted:
            self._warned_unsorted = True
            logger.warning(
                "The multimodal items of a request are not in the order of their tokens. vllm-omni-sched sorts them "
                "and serves the request; further requests of this kind are not logged."
            )

    def preempted(self, request: Request) -> None:
        """Record that vLLM has taken a request's blocks and put it back into the queue."""
        self.sessions.lost_blocks(request.request_id)
        if self.policies is not None:
            self.policies.preempted(request.request_id)

    def leave(self, request: Request) -> None:
        """Drop the state of a request that vLLM has freed."""
        features = request.mm_features
        if isinstance(features, FeatureList):
            self.inputs.num_indexed -= 1
            if features.spill is not None:
                self.metrics.spilled_bytes -= features.spill.size_bytes
            features.close()
            self.sessions.end(request.request_id)
        if self.policies is not None:
            self.policies.leave(request)

    def reset_prefix_cache(self, reset: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
        """Return what vLLM's own ``reset`` returns; no KV block is lent to an encode meanwhile."""
        if self.policies is None or self.policies.lent is None:
            return reset(*args, **kwargs)
        with self.policies.lent.returned():
            return reset(*args, **kwargs)

    def forget_encodings(self) -> None:
        """Use no encoding that was made so far, except those in vLLM's encoder cache: the weights may have changed."""
        for keeper in self.keepers:
            keeper.forget()

    def close(self) -> None:
        """Stop publishing metrics, and write what is not written yet of the history."""
        if self.publisher is not None:
            self.publisher.close()
        if self.policies is not None:
            self.policies.close()
