"""Implement the rules of `StageGate` plainly: every decision looks at all waiting requests."""

from __future__ import annotations

import math

from vllm_omni_sched.graph.order import Undated
from vllm_omni_sched.resource.pipeline.balance import CostBalancer
from vllm_omni_sched.resource.pipeline.stage_gate import (
    MOST_AHEAD,
    GatePlan,
    GateRoom,
    GateTerms,
    Release,
    ReleaseReason,
)


class PlainGate:
    """Gate with the rules of `StageGate` except affinity of requests; O(n log n) for each release."""

    def __init__(self, order, max_hold_seconds, min_share, max_passed, balancer=None):
        self.balancer = balancer or CostBalancer()
        self.order, self.max_hold_seconds, self.min_share, self.max_passed = (
            order,
            max_hold_seconds,
            min_share,
            max_passed,
        )
        self.requests, self.came, self.passed, self.ahead = {}, {}, {}, {}
        self.number, self.owed, self.now = 0, 0.0, 0.0

    def put(self, request, now):
        name = request.request_id
        self.requests[name] = request
        if name not in self.came:
            self.came[name] = self.number, now
            self.passed[name] = self.ahead[name] = 0
            self.number += 1

    def remove(self, name):
        for of in (self.requests, self.came, self.passed, self.ahead):
            of.pop(name, None)

    def release(self, now, replicas, rng, terms=None):
        self.now, self.room, self.terms = now, GateRoom(replicas), terms or GateTerms()
        self.closed, window_over, releases = set(), False, []
        self.healthy = [one for one in replicas if one.healthy]
        self.work = math.fsum(
            [one.waiting.cost_seconds for one in self.requests.values()]
            + [one.remaining_seconds for one in self.healthy]
        )
        while self.requests and self.room.has_room():
            chosen = self._next(window_over)
            if chosen is None:
                break
            one, reason = chosen
            window_over = window_over or reason is ReleaseReason.WINDOW_OVER
            if not self.terms.take(one.request_id):
                self.closed.add(one.needs)
                continue
            near = self.terms.warm(one.request_id), self.terms.distances(one.request_id)
            to_fill = reason is ReleaseReason.BATCH_FULL
            cost = one.waiting.cost_seconds
            saved = self.terms.saved_seconds(one.request_id)
            replica_id = self.room.place(
                cost, one.units, near, self.balancer, rng, to_fill, saved_seconds=saved if near[0] else None
            )
            releases.append(Release(one.request_id, replica_id, reason))
            self._count(one, reason)
        ends = [self._ends(name) for name in self.requests if self._in_window(name)]
        return GatePlan(tuple(releases), min(ends, default=None))

    def _in_window(self, name):
        """Whether it is held for more to come, and for nothing else."""
        one, overdue = self.requests[name], self._overdue()
        if not self._has_credits(one) or not self.room.has_room() or one.units > self.room.units:
            return False
        return overdue is None or (self._has_credits(overdue) and not one.units)

    def _next(self, window_over):
        in_order = sorted(self.requests.values(), key=lambda one: self.order.key(one.waiting, self.now))
        able = [one for one in in_order if self._has_credits(one) and one.units <= self.room.units]
        overdue = self._overdue()
        if overdue is not None:
            if not self._has_credits(overdue):
                return None
            if overdue.units <= self.room.units:
                return overdue, ReleaseReason.OVERDUE
            able = [one for one in able if not one.units]
        if not able:
            return None
        low = [one for one in able if one.low]
        if low and not able[0].low and self.owed >= 1 - self.min_share - 1e-9:
            return low[0], ReleaseReason.LOW_SHARE
        longest = self._ends_last(able)
        if longest is not None:
            return longest, ReleaseReason.LONGEST
        starts = [one for one in able if one.units <= self.room.idle_units]
        if starts:
            return starts[0], ReleaseReason.IDLE
        if window_over or any(self.now >= self._ends(one.request_id) for one in able):
            return able[0], ReleaseReason.WINDOW_OVER
        if len(able) >= self.room.least_room(able[0].units):
            return able[0], ReleaseReason.BATCH_FULL
        return None

    def _ends_last(self, able):
        """The longest one of the first one's class, if all else could be done within its cost."""
        few = len(self.healthy) < 2 or max(self.ahead.values()) >= MOST_AHEAD
        first = self.order.key(able[0].waiting, self.now)
        if self.order.undated is not Undated.BALANCED or few or first.due < math.inf:
            return None
        alike = [one for one in able if self.order.key(one.waiting, self.now)[:5] == first[:5]]
        longest = max(alike, key=lambda one: (one.waiting.cost_seconds, -self.came[one.request_id][0]))
        cost = longest.waiting.cost_seconds
        rest = (self.work - cost) / len(self.healthy)
        return longest if cost > able[0].waiting.cost_seconds and cost >= rest - 1e-9 * self.work else None

    def _has_credits(self, one):
        return one.needs not in self.closed and self.terms.has_credits(one.needs)

    def _overdue(self):
        oldest = min(self.came, key=self.came.get)
        return self.requests[oldest] if self.passed[oldest] >= self.max_passed else None

    def _ends(self, name):
        return self.came[name][1] + self.max_hold_seconds

    def _count(self, released, reason):
        number = self.came[released.request_id][0]
        self.remove(released.request_id)
        for name, (came, _) in self.came.items():
            self.passed[name] += came < number
            self.ahead[name] += reason is ReleaseReason.LONGEST and came < number
        if released.low:
            self.owed = max(self.owed - (1 - self.min_share), 0.0)
        elif any(one.low for one in self.requests.values()):
            self.owed = min(self.owed + self.min_share, 1.0)
