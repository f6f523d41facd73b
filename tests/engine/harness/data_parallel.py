"""`python -m tests.engine.harness.data_parallel MODEL RESULTS.json stock|ours|lending`: serve with two engine cores.

RESULTS.json: `{"requests": {id: Heard}, "lanes": {engine: encodings from its lane}, "processes": number of them,
"left": what is left of these when the engine is shut down, as command lines}`. With `lending`, also `"loans": {engine:
number of loans}`, and `"lent": {engine: KV blocks that are still lent}` when nothing is left to do.
"""

from __future__ import annotations

import json
import re
import sys
import time
from contextlib import suppress
from pathlib import Path

from tests.engine.harness.engines import AMPLE
from tests.engine.harness.lending import OPTIONS as LENDING
from tests.engine.harness.scenarios import SCENARIOS
from tests.engine.harness.served import ServedEngine
from tests.engine.harness.spec import OURS, EngineSpec
from tests.engine.harness.tensor_parallel import ALL_AHEAD

SCENARIO = "images"
SAMPLE = r'^vllm:omni_sched_encoder_cache_tier_total{engine="(\d+)",.*?tier="(\w+)"} (\S+)$'
LOANS = r'^vllm:omni_sched_kv_loans_total{engine="(\d+)",.*?reason="lent".*?} (\S+)$'
LENT = r'^vllm:omni_sched_kv_lent_blocks{engine="(\d+)".*?} (\S+)$'
OPTIONS = {"ours": ALL_AHEAD, "lending": LENDING}
PATIENCE_SECONDS = 60
ONE_NUMA_NODE = {"VLLM_CPU_SIM_MULTI_NUMA": "0"}
"""Set to anything: vLLM gives each engine the memory node of its own rank otherwise, and this machine has one node."""


def spec_of(model: str, side: str) -> EngineSpec:
    spec = EngineSpec("data-parallel", model, (SCENARIO,), args={**AMPLE, "data_parallel_size": 2}, processes=True)
    if side == "stock":
        return spec
    return EngineSpec(**{**vars(spec), "scheduler": OURS, "omni_sched": OPTIONS[side]})


def main(model: str, results_file: str, side: str) -> None:
    import psutil

    scenario = SCENARIOS[SCENARIO]()
    engine = ServedEngine(spec_of(model, side))
    try:
        results = {"requests": engine.run(scenario)["requests"]}
        if side in OPTIONS:
            results["lanes"] = encodings_from_lanes(sum(len(request.images) for request in scenario.requests))
        if side == "lending":
            results["lent"] = lent_at_last()
            results["loans"] = by_engine(LOANS)
        children = psutil.Process().children(recursive=True)
    finally:
        engine.close()
    _, alive = psutil.wait_procs(children, timeout=60)
    left = []
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            left.append(" ".join(process.cmdline()))
    left = [command for command in left if "resource_tracker" not in command]  # Python's own: it ends with this process
    Path(results_file).write_text(json.dumps({**results, "processes": len(children), "left": left}))


def encodings_from_lanes(items: int) -> dict[str, float]:
    """Return how many encodings came from the lane of each engine, once metrics tell where so many came from."""
    from prometheus_client import generate_latest

    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        page = generate_latest().decode()
        counts = [(tier, engine, float(count)) for engine, tier, count in re.findall(SAMPLE, page, flags=re.MULTILINE)]
        if sum(count for _, _, count in counts) >= items:
            return {engine: count for tier, engine, count in counts if tier == "lane"}
        time.sleep(0.1)
    raise TimeoutError(f"the metrics tell of {counts}, not of {items} items")


def by_engine(sample: str) -> dict[str, float]:
    """Return the value of a metric for each engine."""
    from prometheus_client import generate_latest

    found = re.findall(sample, generate_latest().decode(), flags=re.MULTILINE)
    return {engine: float(value) for engine, value in found}


def lent_at_last() -> dict[str, float]:
    """Return how many KV blocks each engine lends, once that is none, or after a long time."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while any((lent := by_engine(LENT)).values()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return lent


if __name__ == "__main__":
    main(*sys.argv[1:])
