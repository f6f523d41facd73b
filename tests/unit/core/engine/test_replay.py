"""The same events get the same answers: what a simulated engine told its core, told to another core."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.core_trace import record, replay
from tests.support.sim_engine import PlainCosts, Run
from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.sim.engine.limits import make_core
from vllm_omni_sched.sim.work import Item, Request

OPTIONS: dict[str, dict[str, Any]] = {
    "ahead": {"encode_ahead": True, "waiting_order": "sla", "prefill_control": "adaptive"},
    "rounds": {"encode_rounds": True, "pieces": True, "batch_control": "pid"},
    "order": {"waiting_order": "sla"},
}


def requests(seed: int) -> list[Request]:
    rng = np.random.default_rng(seed)
    at = np.cumsum(rng.exponential(0.05, 60))
    return [
        Request(
            i,
            float(at[i]),
            int(rng.integers(1, 300)),
            int(rng.integers(1, 30)),
            tuple(
                Item(str(rng.choice(["image", "audio"])), int(rng.integers(1, 90)), int(rng.integers(0, 25)))
                for _ in range(int(rng.integers(0, 4)))
            ),
        )
        for i in range(60)
    ]


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("seed", range(3))
def test_a_replayed_run_is_decided_as_it_was(name: str, seed: int) -> None:
    costs = PlainCosts(base=0.004, decode=1e-4, prefill=1e-5, embed=1e-3, left=0.7)
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "encoder_cache_embeds": 400}
    run = Run(costs, limits, **OPTIONS[name])
    events = record(run.core)
    run.serve(requests(seed))
    assert len(run.ended) == 60
    assert len(run.core.book) == 0
    assert replay(events, make_core(OmniSchedConfig(**OPTIONS[name]), run.limits)) > 100
