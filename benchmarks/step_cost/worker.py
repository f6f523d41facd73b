"""The subprocess of one variant: prepares scenarios and takes samples, as told on stdin.

Requests and their answers:

    {"do": "prepare", "scenario": "decode", "size": 1024}   {"kind": "prepared", "scheduler": "OmniScheduler"}
    {"do": "sample", "count": 20}                           {"kind": "samples", "samples": [seconds, …]}
    {"do": "profile", "count": 20}                          {"kind": "profile", "lines": [[seconds, calls, name], …]}
    {"do": "message"}                                       {"kind": "message", "bytes": 2048}; null where there is none

`count` is an upper bound: expensive samples end a round early.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import logging
import pstats
import sys
import time
from typing import Any

from benchmarks.harness.child import emit

ROUND_SECONDS = 1.0  # wall time after which a round takes no further sample


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ours", action="store_true")
    parser.add_argument("--tree", action="store_true", help="vLLM comes from a source tree on PYTHONPATH")
    parser.add_argument("--sync", action="store_true")
    parser.add_argument("--runner-v2", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    if options.tree:
        from benchmarks.step_cost.tree import enter_tree

        enter_tree()
    import vllm

    import vllm_omni_sched
    from benchmarks.step_cost.scenarios import SCENARIOS

    scheduler_cls = vllm_omni_sched.OmniScheduler if options.ours else None
    # As the engine core does after start-up: what is there now is not walked again by the collector.
    gc.collect()
    gc.freeze()
    emit("up", vllm=vllm.__version__)
    scenario: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        started = time.monotonic()
        if request["do"] == "prepare":
            if scenario is not None:
                scenario.close()
            scenario = None
            gc.collect()
            kind = SCENARIOS[request["scenario"]]
            scenario = kind(
                scheduler_cls, request["size"], async_scheduling=not options.sync, runner_v2=options.runner_v2
            )
            emit("prepared", scheduler=type(scenario.scheduler).__qualname__)
        elif request["do"] == "profile":
            emit("profile", lines=profile(scenario, request["count"]))
        elif request["do"] == "message":
            emit("message", bytes=scenario.message_bytes() if hasattr(scenario, "message_bytes") else None)
        else:
            samples: list[float] = []
            while len(samples) < request["count"] and (not samples or time.monotonic() - started < ROUND_SECONDS):
                samples.append(scenario.sample())
            emit("samples", samples=samples)


def profile(scenario: Any, count: int, top: int = 25) -> list[tuple[float, float, str]]:
    """Profile the timed sections of `count` samples: (own seconds per sample, calls per sample, function).

    Own time only; a profiler charges every call, so small functions look dearer than they are.
    """
    scenario.timed.profiler = cProfile.Profile(time.thread_time)
    for _ in range(count):
        scenario.sample()
    stats = pstats.Stats(scenario.timed.profiler).stats  # type: ignore[attr-defined]
    scenario.timed.profiler = None
    rows = [
        (own / count, calls / count, f"{name} ({'/'.join(file.split('/')[-2:])}:{line})")
        for (file, line, name), (_, calls, own, _, _) in stats.items()
    ]
    return sorted(rows, reverse=True)[:top]


if __name__ == "__main__":
    main()
