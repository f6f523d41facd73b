"""Detect edges between stages whose transfers fail or take longer than before."""

import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from statistics import median

from vllm_omni_sched.monitor.anomaly.finding import Anomaly, AnomalyKind

_REGIMES = 64  # of one edge; the least recently used is dropped
_LEARN = 32  # transfers of a regime before it is judged
_KEPT = 128  # transfers kept per regime


@dataclass(slots=True)
class _Regime:
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    fresh: int = 0
    usual: float = 0.0


@dataclass(slots=True)
class _Edge:
    recent: deque[tuple[float, int, int]]  # time, failed transfers, transfers
    total: int = 0  # of `recent`
    failed_before: float = 0.0
    total_before: float = 0.0
    regimes: OrderedDict[tuple[int, int], _Regime] = field(default_factory=OrderedDict)
    slower: deque[tuple[float, float]] = field(default_factory=deque)  # time, and how many times as long as usual
    times_slower: float = 1.0  # the median of these


class SickEdge:
    """Finds edges between stages that fail or slow down.

    1. Errors: of the last ``recent`` transfers, at least ``least_failed`` failed, and a larger part than
       ``least_error_rate`` and than twice that of earlier transfers, which are forgotten at the rate of ``memory``.
    2. Latency: the median of the last ``looked_at`` transfers takes more than ``limit`` times as long as usual. That is
       the median of that edge in the same regime, which is a class of message size and of transfers in flight. A new
       regime is learned first: after a change of load the edge is compared with itself under that load.
    3. If the other edges are slower than usual too, their median is divided out: the host is slow, not the edge.
    4. A transfer that takes more than ``limit`` times as long as usual is not learned, so that a sick edge does not
       become the norm.
    """

    recent = 64
    memory = 4096
    least_failed = 8
    looked_at = 16
    limit = 1.75

    def __init__(self, least_error_rate: float = 0.02) -> None:
        self.least_error_rate = least_error_rate
        self._edges: dict[str, _Edge] = {}

    def observe(
        self, edge: str, now: float, seconds: float, nbytes: int = 0, in_flight: int = 1, *, ok: bool = True
    ) -> None:
        """Record the end of a transfer, with so many in flight on that edge; the time of a failed one is ignored."""
        self.observe_many(edge, now, seconds, nbytes, in_flight, well=int(ok), failed=int(not ok))

    def observe_many(
        self, edge: str, now: float, seconds: float, nbytes: int = 0, in_flight: int = 1, *, well: int, failed: int
    ) -> None:
        """Record the end of several transfers in unknown order: ``well`` succeeded, ``failed`` did not.

        ``seconds`` and ``nbytes`` are the means of those that succeeded. They count as one latency: copies of a
        mean that one slow transfer has raised would look like as many slow transfers.

        Raises:
            ValueError: a count is negative, or both are 0.
        """
        if well < 0 or failed < 0 or not well + failed:
            raise ValueError(f"well and failed must be 0 or more, with at least one above 0, got {well} and {failed}")
        state = self._edges.setdefault(edge, _Edge(deque()))
        state.recent.append((now, failed, well + failed))
        state.total += well + failed
        while state.total - state.recent[0][2] >= self.recent:
            _, old_failed, old = state.recent.popleft()
            state.total -= old
            keep = (1 - 1 / self.memory) ** old
            state.failed_before = state.failed_before * keep + old_failed
            state.total_before = state.total_before * keep + old
        if well:
            self._latency(state, now, max(seconds, 1e-9), _regime_of(nbytes, in_flight))

    def forget(self, edge: str) -> None:
        """Forget an edge, one end of which was restarted."""
        self._edges.pop(edge, None)

    def check(self, now: float) -> tuple[Anomaly, ...]:
        """Return all sick edges; an edge that fails and is slow is returned twice."""
        return tuple(
            found
            for name, state in self._edges.items()
            for found in (self._errors(name, state), self._slow(name, state))
            if found is not None
        )

    def _latency(self, state: _Edge, now: float, seconds: float, key: tuple[int, int]) -> None:
        regime = state.regimes.setdefault(key, _Regime())
        state.regimes.move_to_end(key)
        if len(state.regimes) > _REGIMES:
            state.regimes.popitem(last=False)
        slower = 1.0
        if len(regime.seconds) >= _LEARN:
            slower = seconds / regime.usual
            state.slower.append((now, slower))
            if len(state.slower) > self.looked_at:
                state.slower.popleft()
            if len(state.slower) == self.looked_at:
                state.times_slower = median(times for _, times in state.slower)
        if slower <= self.limit:
            regime.seconds.append(seconds)
            regime.fresh += 1
            if len(regime.seconds) == _LEARN or regime.fresh >= _LEARN:
                regime.usual = median(regime.seconds)
                regime.fresh = 0

    def _errors(self, name: str, state: _Edge) -> Anomaly | None:
        total = state.total
        failed = sum(one for _, one, _ in state.recent)
        usual = state.failed_before / state.total_before if state.total_before >= self.recent else 0.0
        bound = max(self.least_error_rate, 2 * usual)
        if failed < self.least_failed or failed / total <= bound:
            return None
        since = next(at for at, one, _ in state.recent if one)
        evidence = {"failed": float(failed), "transfers": float(total), "rate": failed / total, "bound": bound}
        return Anomaly(AnomalyKind.SICK_EDGE_ERRORS, name, since, evidence)

    def _slow(self, name: str, state: _Edge) -> Anomaly | None:
        others = [other.times_slower for edge, other in self._edges.items() if edge != name]
        times_slower = state.times_slower / max(median(others) if others else 1.0, 1.0)
        if times_slower <= self.limit:
            return None
        since = next(at for at, times in state.slower if times > self.limit)
        return Anomaly(AnomalyKind.SICK_EDGE_LATENCY, name, since, {"times_slower": times_slower, "limit": self.limit})


def _regime_of(nbytes: int, in_flight: int) -> tuple[int, int]:
    """Return classes of size (two octaves wide) and load (half an octave wide); sizes below a megabyte matter less."""
    return round(math.log2(max(nbytes, 1)) / 2), round(2 * math.log2(max(in_flight, 1)))
