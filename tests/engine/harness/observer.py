"""Record what a scheduler does: its decisions by step, the requests that leave, and the messages to the workers."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any


class Observer:
    """Watches one scheduler object, of whatever class, from outside.

    steps             one line per step that scheduled tokens: its tokens and encoder inputs by request, preemptions
    left              how often each request was freed: once, if all is well
    preempted         how often each request was preempted
    messages          types of the entries of `scheduled_new_reqs`, counted
    update_bytes      pickled size of such an entry, at each power of two of a session's updates
    idle              steps that scheduled nothing while a request without items had not begun
    tiers             encodings that requests took, by where they were (our scheduler only)
    feature_lists     types of `request.mm_features`, counted over requests with items
    waiting           numbers of waiting requests, before and after the tokens of each step: `differences` between the
                      sum of ours by class and vLLM's own, the `most` at a time, and ours by class `at_the_end`; None
                      where none are counted by class
    """

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.reset()
        self._wrap("schedule", self._after_schedule)
        self._wrap("schedule", self._compare_waiting)
        self._wrap("update_from_output", self._compare_waiting)
        self._wrap("_preempt_request", lambda _, request, *__: self.preempted.update([request.request_id]))
        self._wrap("_free_request", lambda _, request, *__: self.left.update([request.request_id]))

    def reset(self) -> None:
        self.steps: list[str] = []
        self.left: Counter[str] = Counter()
        self.preempted: Counter[str] = Counter()
        self.messages: Counter[str] = Counter()
        self.idle = 0
        self.update_bytes: dict[str, list[int]] = {}
        self.feature_lists: Counter[str] = Counter()
        self._updates: Counter[str] = Counter()
        self._tiers_before = _tiers(self.scheduler)
        self._waiting_differences: list[tuple[int, int]] = []
        self._waiting_most = 0

    def report(self) -> dict[str, Any]:
        scheduler = self.scheduler
        if hasattr(scheduler.encoder_cache_manager, "validate"):
            scheduler.encoder_cache_manager.validate()
        return {
            "steps": self.steps,
            "left": dict(self.left),
            "preempted": dict(self.preempted),
            "messages": dict(self.messages),
            "idle": self.idle,
            "update_bytes": self.update_bytes,
            "feature_lists": dict(self.feature_lists),
            "still_there": sorted(scheduler.requests),
            "waiting": self._waiting(),
            "tiers": {tier: count - self._tiers_before[tier] for tier, count in _tiers(scheduler).items()},
        }

    def _wrap(self, name: str, after: Any) -> None:
        method = getattr(self.scheduler, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            after(result, *args)
            return result

        setattr(self.scheduler, name, watched)

    def _waiting_by_class(self) -> dict[str, int]:
        """Return the waiting requests by class, as our scheduler counts them; empty if it does not."""
        return dict(self.scheduler.omni.metrics.waiting_requests) if hasattr(self.scheduler, "omni") else {}

    def _compare_waiting(self, *_: Any) -> None:
        if by_class := self._waiting_by_class():
            ours, (_, vllms) = sum(by_class.values()), self.scheduler.get_request_counts()
            self._waiting_most = max(self._waiting_most, ours)
            if ours != vllms:
                self._waiting_differences.append((ours, vllms))

    def _waiting(self) -> dict[str, Any] | None:
        by_class = self._waiting_by_class()
        if not by_class:
            return None
        return {"differences": self._waiting_differences, "most": self._waiting_most, "at_the_end": by_class}

    def _after_schedule(self, output: Any, *_: Any) -> None:
        if not output.num_scheduled_tokens:
            requests = self.scheduler.requests.values()
            self.idle += any(not one.mm_features and not one.num_computed_tokens for one in requests)
            return
        line = " ".join(f"{request}:{count}" for request, count in output.num_scheduled_tokens.items())
        if output.scheduled_encoder_inputs:
            encoded = sorted((request, list(inputs)) for request, inputs in output.scheduled_encoder_inputs.items())
            line += " | encode " + " ".join(f"{request}:{inputs}" for request, inputs in encoded)
        if output.preempted_req_ids:
            line += " | preempted " + " ".join(sorted(output.preempted_req_ids))
        self.steps.append(line)
        for message in output.scheduled_new_reqs:
            self.messages[type(message).__name__] += 1
            self._updates[message.req_id] += 1
            if self._updates[message.req_id].bit_count() == 1:
                self.update_bytes.setdefault(message.req_id, []).append(len(pickle.dumps(message)))
            features = self.scheduler.requests[message.req_id].mm_features
            if features:
                self.feature_lists[type(features).__name__] += 1


def _tiers(scheduler: Any) -> dict[str, int]:
    """Return the metric `encoder_cache_tier_total` as it would be published now; empty without our scheduler."""
    if not hasattr(scheduler, "omni"):
        return {}
    from vllm_omni_sched.engine.build import refresh
    from vllm_omni_sched.monitor.metrics import METRICS

    planner = getattr(scheduler.omni.policies, "planner", None)
    refresh(scheduler.omni.metrics, scheduler.encoder_cache_manager, None, [planner] if planner else [])
    [metric] = [metric for metric in METRICS if metric.name == "encoder_cache_tier_total"]
    return {tier: getattr(scheduler.omni.metrics, attribute) for tier, attribute in metric.fields.items()}
