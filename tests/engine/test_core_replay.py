"""A real scheduler and the simulator decide alike: events of the one, told to the core that the other would have."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.engine.harness.bench import EMBEDS, Bench
from tests.support.core_trace import record, replay
from tests.support.steered import request, scheduler_with
from vllm_omni_sched.sim.engine.limits import EngineLimits, make_core
from vllm_omni_sched.testing import make_item, run_step


def simulated(scheduler: Any) -> Any:
    """The core that a simulated engine of the same sizes and options has."""
    settings = scheduler.scheduler_config
    limits = EngineLimits(
        10**9,
        settings.max_num_seqs,
        scheduler.max_num_scheduled_tokens,
        scheduler.max_num_encoder_input_tokens,
        scheduler.encoder_cache_manager.cache_size,
        paced=True,
        lane_beside=False,
    )
    return make_core(scheduler.omni.policies.core.config, limits)


@pytest.mark.parametrize("seed", range(4))
def test_encode_ahead(seed: int) -> None:
    rng = random.Random(seed)
    bench = Bench(async_scheduling=seed % 2 == 1, encoder_cache_size=24, max_num_seqs=4, num_blocks=40)
    scheduler = bench.scheduler
    events = record(scheduler.omni.policies.core)
    bench.poisoned = {"item-3"} if seed > 1 else set()
    bench.churn(rng, 25, lambda: rng.randrange(12))
    assert replay(events, simulated(scheduler)) > 200
    assert {"next_chunk", "encoded", "load"} <= {event.name for event in events}


@pytest.mark.parametrize("seed", range(4))
def test_rounds_and_limits(seed: int) -> None:
    rng = random.Random(seed)
    options = {
        "encode_rounds": True,
        "waiting_order": "sla",
        "prefill_control": "adaptive",
        "batch_control": "pid",
        "pieces": True,
    }
    scheduler = scheduler_with(options, max_num_seqs=8, num_blocks=40)
    core = scheduler.omni.policies.core
    core.costs.encoded("image", EMBEDS, 0.2)
    events = record(core)
    for i in range(20):
        items = [make_item(4 + 10 * k, EMBEDS, f"{rng.randrange(9)}") for k in range(rng.randrange(3))]
        scheduler.add_request(request(f"r{i}", 4 + 10 * len(items) + rng.randrange(1, 60), items))
        run_step(scheduler)
    for _ in range(500):
        run_step(scheduler)
        if not scheduler.requests:
            break
    again = simulated(scheduler)
    again.costs.encoded("image", EMBEDS, 0.2)
    assert replay(events, again) > 100
    assert not scheduler.requests
