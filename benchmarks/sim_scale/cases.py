"""Time a run of the simulator in a process of its own, so that its memory is its own.

An event is what a simulator that skips nothing would take from its heap: an arrival, the entry of a request into an
engine, the end of a step, the end of an item in a lane, an answer, a sample of the timeline. The end of a step counts
once, whether the step is simulated alone or computed together with others; entries of the heap that are void by then,
since the steps they stand for are counted already, do not count (`tests/properties/test_sim_leaps.py`).
"""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_omni_sched.graph.waiting_queue import WaitingQueue
from vllm_omni_sched.resource.engine.lane import EncodeShare
from vllm_omni_sched.resource.pipeline.stage_gate import StageGate
from vllm_omni_sched.sim import compiled
from vllm_omni_sched.sim.pools.choose import BalancerChooser, RoundRobinChooser
from vllm_omni_sched.sim.run import simulate
from vllm_omni_sched.sim.scenario.loader import load

_SCENARIO = """
name = "sim_scale"
seed = {seed}
duration_seconds = {seconds}
drain_seconds = 0.0
[slo]
ttft_seconds = 2.0
itl_seconds = 0.1
[workload]
kind = "mix"
rate = {rate}
[[workload.parts]]
kind = "text"
weight = 1.0
[[workload.parts]]
kind = "servegen-mm-image"
weight = 1.0
[cluster]
device = "a100-80gb"
nodes = {nodes}
{options}
[[stages]]
name = "llm"
kind = "engine"
model = "qwen2.5-vl-7b"
replicas = {gpus}
"""
_OURS = '[policy]\nwaiting_order = "sla"\nencode_ahead = true\n'
_STAGE = {"stock": "", "ours": 'encoder = "lane"\nbalance = "cost"\n', "gated": 'encoder = "lane"\n'}
_OPTIONS = {"stock": "", "ours": _OURS, "gated": _OURS + "[orchestration.graph]\n"}


@dataclass(frozen=True)
class Case:
    """Describes a run of the simulator.

    ``rate``: requests per second and GPU. ``timed``: decisions are timed, which takes time itself, and needs the
    sources. ``compiled``: with the compiled modules, if they are built (`vllm_omni_sched.sim.compiled`).
    """

    variant: str
    gpus: int
    rate: float
    seconds: float
    seed: int = 0
    timed: bool = False
    compiled: bool = True


def run(case: Case) -> dict[str, Any]:
    """Run a case and return the processor seconds of its one thread and the largest resident memory."""
    text = _SCENARIO.format(
        seed=case.seed, seconds=case.seconds, rate=case.rate * case.gpus, nodes=-(-case.gpus // 8), gpus=case.gpus,
        options=_OPTIONS[case.variant],
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "scenario.toml"
        path.write_text(text + _STAGE[case.variant])
        scenario = load(path)
    timers = _timers() if case.timed else {}
    begun, at = time.perf_counter(), time.process_time()
    result = simulate(scenario)
    seconds, wall = time.process_time() - at, time.perf_counter() - begun
    requests = len(result.records) + result.lost
    return {
        "variant": case.variant,
        "gpus": case.gpus,
        "rate_per_gpu": case.rate,
        "compiled": compiled.active,
        "simulated_seconds": case.seconds,
        "requests": requests,
        "events": result.events,
        "cpu_seconds": round(seconds, 3),
        "wall_seconds": round(wall, 3),
        "events_per_second": round(result.events / seconds),
        "cpu_seconds_per_simulated_second": round(seconds / case.seconds, 5),
        "cpu_us_per_request": round(seconds / requests * 1e6, 1),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "decisions": {name: one.summary() for name, one in timers.items() if one.calls},
    }


class _Timer:
    """Seconds of a function, without what the clock itself takes."""

    def __init__(self) -> None:
        self.calls, self.nanoseconds = 0, 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        clock = time.perf_counter_ns
        own = min(-(clock() - clock()) for _ in range(1000))

        def timed(*given: Any, **named: Any) -> Any:
            begun = clock()
            found = function(*given, **named)
            self.nanoseconds += clock() - begun - own
            self.calls += 1
            return found

        return timed

    def summary(self) -> dict[str, float]:
        return {"calls": self.calls, "mean_us": round(self.nanoseconds / self.calls / 1e3, 2)}


def _timers() -> dict[str, _Timer]:
    """Replace the decisions by timed ones for the rest of this process."""
    timers: dict[str, _Timer] = {}
    places: list[tuple[Any, str, str]] = [
        (WaitingQueue, "pop", "WaitingQueue.pop"),
        (EncodeShare, "place", "EncodeShare.place"),
        (BalancerChooser, "choose", "balancer: cost"),
        (RoundRobinChooser, "choose", "balancer: round robin"),
        (StageGate, "release", "StageGate.release"),
    ]
    for holder, attribute, name in places:
        timers[name] = _Timer()
        setattr(holder, attribute, timers[name].around(getattr(holder, attribute)))
    return timers
