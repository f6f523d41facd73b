"""Detect edges between stages whose transfers fail more often or take longer than before."""

import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from statistics import median

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.monitor.anomaly.finding import Anomaly, AnomalyKind
from vllm_omni_sched.monitor.anomaly.statistics import centre_and_spread, wilson

_REGIMES = 64  # of one edge; the least recently used is dropped
_LEARN = 32  # transfers of a regime before it is judged
_KEPT = 128  # transfers kept per regime
_CLIP = 3.0  # most spreads that one transfer counts for
_PEER_WEIGHT = 0.1


@dataclass(slots=True)
class _Regime:
    logs: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    fresh: int = 0
    centre: float = 0.0
    spread: float = 1.0


@dataclass(slots=True)
class _Edge:
    recent: deque[tuple[float, int, int]]  # time, failed transfers, transfers
    total: int = 0  # of `recent`
    failed_before: float = 0.0
    total_before: float = 0.0
    regimes: OrderedDict[tuple[int, int], _Regime] = field(default_factory=OrderedDict)
    sum: float = 0.0  # of the CUSUM
    since: float = 0.0
    shift: float = 0.0  # recent mean distance, in spreads


class SickEdge:
    """Finds edges between stages that fail or slow down.

    1. Errors: the lower Wilson bound of the failures in the last ``recent`` transfers is above ``least_error_rate`` and
       above the upper bound of earlier transfers, which are forgotten at the rate of ``memory`` transfers.
    2. Latency: a CUSUM (Page, "Continuous Inspection Schemes", 1954) of log latency, in robust spreads from the
       median of that edge in the same regime, which is a class of message size and of transfers in flight. A new regime
       is learned first: after a change of load the edge is compared with itself under that load.
    3. The median distance of the other edges is subtracted: if they slow down too, the host is slow, not the edge.
    4. The sum loses ``drift`` spreads per transfer and raises an alarm above ``limit``. While it is above a quarter of
       that nothing is learned, so that a sick edge does not become the norm.

    Raises:
        ConfigError: ``least_error_rate`` is not in (0, 1).
    """

    recent = 64
    memory = 4096
    z = 3.0
    drift = 1.0
    limit = 16.0
    least_spread = 0.35

    def __init__(self, least_error_rate: float = 0.02) -> None:
        if not 0 < least_error_rate < 1:
            raise ConfigError(f"least_error_rate must be in (0, 1), got {least_error_rate}")
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
            self._latency(edge, state, now, math.log(max(seconds, 1e-9)), _regime_of(nbytes, in_flight))

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

    def _latency(self, edge: str, state: _Edge, now: float, log: float, key: tuple[int, int]) -> None:
        regime = state.regimes.setdefault(key, _Regime())
        state.regimes.move_to_end(key)
        if len(state.regimes) > _REGIMES:
            state.regimes.popitem(last=False)
        if len(regime.logs) >= _LEARN:
            distance = min(max((log - regime.centre) / regime.spread, -_CLIP), _CLIP)
            state.shift += _PEER_WEIGHT * (distance - state.shift)
            peers = [other.shift for name, other in self._edges.items() if name != edge]
            common = max(median(peers), 0.0) if peers else 0.0
            if state.sum == 0:
                state.since = now
            # A healed edge is recognised after about as many transfers as it took to find it sick.
            state.sum = min(max(0.0, state.sum + distance - common - self.drift), 2 * self.limit)
        if len(regime.logs) < _LEARN or state.sum <= self.limit / 4:
            regime.logs.append(log)
            regime.fresh += 1
            if len(regime.logs) == _LEARN or regime.fresh >= _LEARN:
                regime.centre, regime.spread = centre_and_spread(regime.logs, self.least_spread)
                regime.fresh = 0

    def _errors(self, name: str, state: _Edge) -> Anomaly | None:
        total = state.total
        failed = sum(one for _, one, _ in state.recent)
        low, _ = wilson(failed, total, self.z)
        _, before = wilson(state.failed_before, state.total_before, self.z)
        usual = before if state.total_before >= self.recent else 0.0  # too little data: only the fixed rate counts
        bound = max(self.least_error_rate, usual)
        if low <= bound:
            return None
        since = next(at for at, one, _ in state.recent if one)
        evidence = {"failed": float(failed), "transfers": float(total), "rate_at_least": low, "bound": bound}
        return Anomaly(AnomalyKind.SICK_EDGE_ERRORS, name, since, evidence)

    def _slow(self, name: str, state: _Edge) -> Anomaly | None:
        if state.sum <= self.limit:
            return None
        evidence = {"cusum": state.sum, "limit": self.limit, "distance": state.shift}
        return Anomaly(AnomalyKind.SICK_EDGE_LATENCY, name, state.since, evidence)


def _regime_of(nbytes: int, in_flight: int) -> tuple[int, int]:
    """Return classes of size (two octaves wide) and load (half an octave wide); sizes below a megabyte matter less."""
    return round(math.log2(max(nbytes, 1)) / 2), round(2 * math.log2(max(in_flight, 1)))
