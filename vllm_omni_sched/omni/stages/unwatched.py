"""Replace the watch of stages with `monitoring.enabled: false`."""

from __future__ import annotations

from typing import Any

from vllm_omni_sched.monitor.anomaly import Anomaly
from vllm_omni_sched.omni.stages.watch import Watch
from vllm_omni_sched.omni.stages.work import Work


class Unwatched(Watch):
    """A `Watch` that checks and keeps nothing."""

    def began(self, work: Work, now: float) -> None:
        pass

    def ended(self, work: Work, now: float, well: bool) -> None:
        pass

    def sent(self, from_stage: int, to_stage: int, seconds: float) -> None:
        pass

    def look(self, pools: list[Any], now: float) -> tuple[Anomaly, ...]:
        return ()
