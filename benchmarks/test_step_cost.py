"""The scenarios of `step_cost` for pytest-benchmark, on the installed vLLM: stock and ours side by side.

    python -m pytest benchmarks/test_step_cost.py --benchmark-group-by=param:name,param:size

For several vLLM versions at once, patched trees, the picture: `python -m benchmarks.step_cost`.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

import vllm_omni_sched
from benchmarks.step_cost.scenarios import SCENARIOS

SIZES = {"many_sessions": (64,), "text_decode": (64,), "text_prefill": (64,)}


def cases() -> list[Any]:
    return [pytest.param(name, size, id=f"{name}-{size}") for name in SCENARIOS for size in SIZES.get(name, (1, 1024))]


@pytest.mark.parametrize("scheduler", ["stock", "ours"])
@pytest.mark.parametrize(("name", "size"), cases())
def test_step_cost(benchmark: Any, name: str, size: int, scheduler: str) -> None:
    """Measure one sample per round, on the scenario's clock: CPU time of the timed sections alone."""
    scheduler_cls = None if scheduler == "stock" else vllm_omni_sched.OmniScheduler
    scenario = SCENARIOS[name](scheduler_cls, size)
    benchmark._timer = lambda: scenario.timed.seconds
    benchmark.pedantic(scenario.sample, rounds=10, warmup_rounds=2)
    scenario.close()
    assert scenario.timed.seconds > 0
