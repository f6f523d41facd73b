"""What is compared, and with what. Engines: the benchmark itself."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.sim_fidelity.simulate import WARM_UP_SECONDS, simulate, trace
from vllm_omni_sched.sim.costs.measured import Calibration, EncodeCosts, FrontendCosts, MeasuredCosts, StepCosts
from vllm_omni_sched.sim.measure import Histogram

IMAGE = EncodeCosts(base_seconds=0.0, per_item=0.0, per_embed=1e-3)


@pytest.fixture
def costs() -> MeasuredCosts:
    step = StepCosts(
        base_seconds=5e-3, per_decode=0.0, per_context_token=0.0, per_prefill_token=2e-5, per_prefill_pair=0.0
    )
    return MeasuredCosts(
        Calibration(
            version=1,
            source="a test",
            step=step,
            encode={"image": IMAGE},
            encode_in_lane={"image": IMAGE},
            frontend=FrontendCosts(per_request=2e-3, per_text_token=0.0, per_item={"image": 1e-2}),
            answer_seconds=1e-3,
            kv_tokens=100_000,
        )
    )


def request(at: float, images: int = 0, ttft: float = 0.01, gaps: int = 9) -> dict[str, Any]:
    return {
        "at": at,
        "text_tokens": 50,
        "embeds": [576] * images,
        "output_tokens": gaps + 1,
        "ttft": ttft,
        "gaps": [0.005] * gaps,
    }


def measured(variant: str, requests: list[dict[str, Any]], pace: float = 1.0, seed: int = 1) -> dict[str, Any]:
    references = [
        {"seconds": 5e-3 * (pace - 0.1), "context": 100.0},
        {"seconds": 5e-3 * (pace + 0.1), "context": 100.0},
    ]
    return {"variant": variant, "load": 0.5, "seed": seed, "requests": requests, "references": references}


def test_requests_are_simulated_when_they_came_with_all_their_items() -> None:
    found = trace([request(2.0, images=2), request(0.5)], first=3)
    assert [(r.number, r.arrival - WARM_UP_SECONDS, r.prompt_tokens) for r in found] == [(3, 0.5, 50), (4, 2.0, 1202)]
    assert len({item.content for r in found for item in r.items}) == 2


def test_an_image_holds_others_up_in_stock_and_not_in_ours(costs: MeasuredCosts) -> None:
    beside = [request(1.0, gaps=300), request(1.5, images=1)]
    largest = {}
    for variant in ("stock", "ours"):
        itl = Histogram()
        simulate(costs, measured(variant, beside), itl)
        largest[variant] = itl.largest
    assert largest["stock"] > 0.5
    assert largest["ours"] < 0.1
