"""Detect requests that stay in a stage for longer than usual."""

import math
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field

from vllm_omni_sched.monitor.anomaly.finding import Anomaly, AnomalyKind
from vllm_omni_sched.monitor.anomaly.statistics import centre_and_spread, slope

_REFIT = 16  # stays between two fits


@dataclass(frozen=True, slots=True)
class _Stay:
    since: float
    number: int  # of the entry


@dataclass(slots=True)
class _Stage:
    seconds: deque[float]  # logarithms, like the loads
    load: deque[float]
    inside: dict[str, _Stay] = field(default_factory=dict)
    entries: int = 0
    # of each load that no later entry has reached: the number of its entry, and the load; the loads fall
    peaks: list[tuple[int, int]] = field(default_factory=list)
    fit: "_Fit | None" = None
    fresh: int = 0  # stays since the fit

    def enter(self, request_id: str, now: float) -> None:
        self.inside.pop(request_id, None)
        self.entries += 1
        self.inside[request_id] = _Stay(now, self.entries)
        load = len(self.inside)
        while self.peaks and self.peaks[-1][1] <= load:
            self.peaks.pop()
        self.peaks.append((self.entries, load))

    def peak(self, stay: _Stay) -> int:
        """Return the most requests that were in the stage at once during a stay, in O(log n)."""
        return self.peaks[bisect_left(self.peaks, (stay.number, 0))][1]


@dataclass(frozen=True)
class _Fit:
    """Fit of log seconds = intercept + exponent * log load, with a spread; up to the largest load seen."""

    intercept: float
    exponent: float
    spread: float
    most: float


class StageTimeout:
    """Finds requests that hang in a stage.

    1. The bound is ``exp(median + k * 1.4826 * MAD)`` of the logarithms of the last ``window`` stays:
       latencies are skewed, and logarithms turn a multiple of the usual into a distance.
    2. The part explained by the load is removed first, and added for the load of the stay in question: seconds grow
       with a power, from 0 to 1, of the most requests that were in the stage during the stay. Above the largest load
       seen they grow in proportion: a stage that never idles is slowed down no more than that.
    3. It is at least ``floor_seconds`` and at most ``cap_seconds``; before ``least_samples`` stays it is the cap.
    4. Only stays that ended normally are learned from; aborted ones are not.

    Each entry and each end takes O(log n) in the requests in the stage.
    """

    def __init__(
        self,
        k: float = 5.0,
        floor_seconds: float = 1.0,
        cap_seconds: float = 600.0,
        least_samples: int = 32,
        window: int = 512,
    ) -> None:
        self.k = k
        self.floor_seconds = floor_seconds
        self.cap_seconds = cap_seconds
        self.least_samples = least_samples
        self.window = window
        self._stages: dict[str, _Stage] = {}

    def enter(self, stage: str, request_id: str, now: float) -> None:
        """Record that a request entered a stage, its queue included."""
        state = self._stages.setdefault(stage, _Stage(deque(maxlen=self.window), deque(maxlen=self.window)))
        state.enter(request_id, now)

    def observe(self, stage: str, request_id: str, now: float, *, finished: bool = True) -> None:
        """Record that a request left the stage; ``finished``: normally. Unknown requests are ignored."""
        state = self._stages.get(stage)
        stay = state.inside.pop(request_id, None) if state else None
        if state and stay and finished:
            state.seconds.append(math.log(max(now - stay.since, 1e-6)))
            state.load.append(math.log(state.peak(stay)))
            state.fresh += 1

    def bound_seconds(self, stage: str, load: int) -> float:
        """Return how long a request may be in the stage at that load."""
        state = self._stages.get(stage)
        if state is None or len(state.seconds) < self.least_samples:
            return self.cap_seconds
        if state.fit is None or state.fresh >= _REFIT:
            state.fit, state.fresh = _fit(state), 0
        fit, log_load = state.fit, math.log(max(load, 1))
        log = (
            fit.intercept + fit.exponent * min(log_load, fit.most) + self.k * fit.spread + max(0.0, log_load - fit.most)
        )
        seconds = math.exp(min(log, 50.0))  # beyond any cap it need not be exact
        return min(max(seconds, self.floor_seconds), self.cap_seconds)

    def check(self, now: float) -> tuple[Anomaly, ...]:
        """Return all requests that are in a stage for too long, the longest there first."""
        found = []
        for name, state in self._stages.items():
            for request_id, stay in state.inside.items():  # in order of arrival
                peak = state.peak(stay)
                bound, seconds = self.bound_seconds(name, peak), now - stay.since
                if seconds > bound:
                    evidence = {"seconds": seconds, "bound_seconds": bound, "load": float(peak)}
                    found.append(Anomaly(AnomalyKind.STAGE_TIMEOUT, name, stay.since + bound, evidence, request_id))
        return tuple(sorted(found, key=lambda one: (-one.evidence["seconds"], one.subject, one.request_id)))


def _fit(state: _Stage) -> _Fit:
    exponent = min(max(slope(state.load, state.seconds), 0.0), 1.0)
    rest = [seconds - exponent * load for seconds, load in zip(state.seconds, state.load, strict=True)]
    intercept, spread = centre_and_spread(rest, least_spread=0.1)
    # The spread of few samples may be too small by chance.
    return _Fit(intercept, exponent, spread * (1 + 4 / math.sqrt(len(rest))), max(state.load))
