"""Detect replicas that have work but send nothing and compute nothing."""

from dataclasses import dataclass, field

from vllm_omni_sched.monitor.anomaly.finding import Anomaly, AnomalyKind


@dataclass(slots=True)
class _Replica:
    since: float | None = None  # since when it has work and neither sends nor computes
    expected_seconds: float = 0.0


@dataclass(slots=True)
class _Stage:
    silences: int = 0  # silences that ended on their own
    longest: dict[int, float] = field(default_factory=dict)  # by block, for the last blocks with a silence


class Silence:
    """Finds replicas that hang although their processes live.

    1. The clock starts when work arrives at an idle replica, and restarts with every message from it and whenever it
       was seen to compute: a slow replica is not silent, however slow it is.
    2. It may run for ``times`` the longest silence of its stage that ended on its own (as on devices whose host sleeps
       while they compute) in the last ``blocks`` blocks of ``block_seconds`` in which there was one, and for ``times``
       the expected time of the longest of its requests.
    3. The bound is between ``floor_seconds`` and ``cap_seconds``; before ``least_samples`` silences of the stage it is
       the cap: a stage may warm up for long before its first message.
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
        """Record the present state of a replica.

        Args:
            work: it has requests whose inputs are there.
            computes: its processes have used processor time since the last call, or it is not known whether they have.
            expected_seconds: expected time of the longest of its requests.
        """
        one = self._replicas.setdefault((stage, replica), _Replica())
        one.expected_seconds = expected_seconds
        if not work:
            one.since = None
        elif computes or one.since is None:
            one.since = now

    def heard(self, stage: str, replica: int, now: float) -> None:
        """Record that the replica has sent a message of any kind."""
        one = self._replicas.get((stage, replica))
        if one is not None and one.since is not None:
            known, block = self._stages.setdefault(stage, _Stage()), int(now // self.block_seconds)
            known.silences += 1
            known.longest[block] = max(known.longest.get(block, 0.0), now - one.since)
            if len(known.longest) > self.blocks:
                del known.longest[next(iter(known.longest))]
            one.since = now

    def forget(self, stage: str, replica: int) -> None:
        """Forget a replica that is gone."""
        self._replicas.pop((stage, replica), None)

    def silent_seconds(self, stage: str, replica: int, now: float) -> float:
        """Return for how long the replica has sent and computed nothing; 0 while it has no work."""
        one = self._replicas.get((stage, replica))
        return 0.0 if one is None or one.since is None else max(now - one.since, 0.0)

    def bound_seconds(self, stage: str, replica: int) -> float:
        """Return for how long the replica may be silent."""
        known, one = self._stages.get(stage), self._replicas.get((stage, replica))
        if known is None or known.silences < self.least_samples:
            return self.cap_seconds
        longest = max(*known.longest.values(), one.expected_seconds if one is not None else 0.0)
        return min(max(self.times * longest, self.floor_seconds), self.cap_seconds)

    def check(self, now: float) -> tuple[Anomaly, ...]:
        """Return all replicas that hang."""
        found = []
        for (stage, replica), one in self._replicas.items():
            seconds, bound = self.silent_seconds(stage, replica, now), self.bound_seconds(stage, replica)
            if one.since is not None and seconds > bound:
                evidence = {"seconds": seconds, "bound_seconds": bound, "replica": float(replica)}
                subject = f"{stage} replica {replica}"
                found.append(Anomaly(AnomalyKind.SILENT_REPLICA, subject, one.since + bound, evidence))
        return tuple(found)
