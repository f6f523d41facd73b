"""Replicas that say nothing, and do nothing, although they have work."""

import math
from dataclasses import dataclass, field

from vllm_omni_sched.errors import ConfigError
from vllm_omni_sched.monitor.anomaly.finding import Anomaly, AnomalyKind


@dataclass(slots=True)
class _Replica:
    since: float | None = None  # since when it has work, and neither says nor does anything
    expected_seconds: float = 0.0


@dataclass(slots=True)
class _Stage:
    silences: int = 0  # that ended by themselves
    longest: dict[int, float] = field(default_factory=dict)  # of each of the last blocks in which there were some


class Silence:
    """Finds replicas that hang, though their processes live.

    1. The clock starts when work comes to a replica that has none, and anew with all that it says, and as often as it
       was seen to compute: one that is slow is not silent, be it as slow as it may.
    2. It may run for ``times`` the longest silence of its stage that ended by itself (as on devices whose host sleeps
       while they compute) in the last ``blocks`` blocks of ``block_seconds`` in which there was one, and for ``times``
       what the longest of its work is expected to take.
    3. The bound is between ``floor_seconds`` and ``cap_seconds``; before ``least_samples`` silences of the stage it is
       the cap: a stage may warm up for long before it says its first word.

    Raises:
        ConfigError: ``times`` is below 1, not ``0 < floor_seconds <= cap_seconds``,
            ``least_samples`` or ``blocks`` is below 1, or ``block_seconds`` not above 0.
    """

    def __init__(
        self,
        times: float = 4.0,
        floor_seconds: float = 1.0,
        cap_seconds: float = 600.0,
        least_samples: int = 32,
        blocks: int = 60,
        block_seconds: float = 60.0,
    ) -> None:
        if not 1 <= times < math.inf:
            raise ConfigError(f"times must be 1 or more, got {times}")
        if not 0 < floor_seconds <= cap_seconds:
            raise ConfigError(f"need 0 < floor_seconds <= cap_seconds, got {floor_seconds} and {cap_seconds}")
        if least_samples < 1 or blocks < 1:
            raise ConfigError(f"least_samples and blocks must be 1 or more, got {least_samples} and {blocks}")
        if not block_seconds > 0:
            raise ConfigError(f"block_seconds must be above 0, got {block_seconds}")
        self.times = times
        self.floor_seconds = floor_seconds
        self.cap_seconds = cap_seconds
        self.least_samples = least_samples
        self.blocks = blocks
        self.block_seconds = block_seconds
        self._replicas: dict[tuple[str, int], _Replica] = {}
        self._stages: dict[str, _Stage] = {}

    def observe(
        self, stage: str, replica: int, now: float, *, work: bool, computes: bool, expected_seconds: float = 0.0
    ) -> None:
        """How it is now.

        Args:
            work: it has requests whose inputs are there.
            computes: its processes have used processors since the last time, or it is not known whether they have.
            expected_seconds: what the longest of its requests is expected to take.
        """
        one = self._replicas.setdefault((stage, replica), _Replica())
        one.expected_seconds = expected_seconds
        if not work:
            one.since = None
        elif computes or one.since is None:
            one.since = now

    def heard(self, stage: str, replica: int, now: float) -> None:
        """It has said something, whatever it was."""
        one = self._replicas.get((stage, replica))
        if one is not None and one.since is not None:
            known, block = self._stages.setdefault(stage, _Stage()), int(now // self.block_seconds)
            known.silences += 1
            known.longest[block] = max(known.longest.get(block, 0.0), now - one.since)
            if len(known.longest) > self.blocks:
                del known.longest[next(iter(known.longest))]
            one.since = now

    def forget(self, stage: str, replica: int) -> None:
        """It is gone."""
        self._replicas.pop((stage, replica), None)

    def silent_seconds(self, stage: str, replica: int, now: float) -> float:
        """For how long it has said and done nothing; 0 while it has no work."""
        one = self._replicas.get((stage, replica))
        return 0.0 if one is None or one.since is None else max(now - one.since, 0.0)

    def bound_seconds(self, stage: str, replica: int) -> float:
        """For how long it may."""
        known, one = self._stages.get(stage), self._replicas.get((stage, replica))
        if known is None or known.silences < self.least_samples:
            return self.cap_seconds
        longest = max(*known.longest.values(), one.expected_seconds if one is not None else 0.0)
        return min(max(self.times * longest, self.floor_seconds), self.cap_seconds)

    def check(self, now: float) -> tuple[Anomaly, ...]:
        """All that hang."""
        found = []
        for (stage, replica), one in self._replicas.items():
            seconds, bound = self.silent_seconds(stage, replica, now), self.bound_seconds(stage, replica)
            if one.since is not None and seconds > bound:
                evidence = {"seconds": seconds, "bound_seconds": bound, "replica": float(replica)}
                subject = f"{stage} replica {replica}"
                found.append(Anomaly(AnomalyKind.SILENT_REPLICA, subject, one.since + bound, seconds / bound, evidence))
        return tuple(found)
