"""Engines of two workers, and what their lanes' processes can meet.

`python -m … MODEL MODE` runs one of our engines through all faults, one after the other, and writes JSON on stdout.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.engine.harness.engines import AMPLE
from tests.engine.harness.inproc import InProcessEngine
from tests.engine.harness.lane_faults import round_of
from tests.engine.harness.spec import OURS, EngineSpec

MODES = ("weights", "data")
FAULTS = ("none", "one dies", "one dies when it is done", "one raises", "all raise", "one dies in its sleep", "no lane")
SCENARIOS = ("images", "repeated_images", "shared_images", "aborts")
ALL_AHEAD = {"encode_ahead": True, "itl_target_ms": 0.01}  # nothing goes unnoticed under such a target


def stock(model: Path, mode: str) -> EngineSpec:
    args = {**AMPLE, "tensor_parallel_size": 2, "mm_encoder_tp_mode": mode}
    return EngineSpec(f"tensor-parallel-{mode}", str(model), SCENARIOS, args=args)


NO_LANE = "tensor-parallel, no lane"
NO_LANE_SCENARIOS = ("images", "repeated_images")


def no_lane(model: Path) -> EngineSpec:
    """Return an engine of ours with a profile, whose model shows only once it is loaded that it can have no lane."""
    args = {
        **stock(model, "weights").args,
        "hf_overrides": {"architectures": ["LlavaThatKeepsItsGroup"]},
        "worker_extension_cls": "tests.engine.harness.models.Registers",
    }
    options = {"profile": "chat", "itl_target_ms": 0.01}
    return EngineSpec(NO_LANE, str(model), NO_LANE_SCENARIOS, args=args, scheduler=OURS, omni_sched=options)


def main(model: str, mode: str) -> None:
    spec = EngineSpec(
        "faults",
        model,
        (),
        args={
            "max_model_len": 512,
            "enable_prefix_caching": False,
            "num_gpu_blocks_override": 200,
            "tensor_parallel_size": 2,
            "mm_encoder_tp_mode": mode,
            "worker_extension_cls": "tests.engine.harness.rank_faults.Faults",
        },
        scheduler=OURS,
        omni_sched=ALL_AHEAD,
    )
    here = InProcessEngine(spec)
    executor = here.core.model_executor
    found: dict[str, Any] = {}
    for number, name in enumerate(FAULTS):
        executor.collective_rpc("meet_fault", args=(number,))
        here.engine.reset_encoder_cache()
        if name == "one dies in its sleep":
            executor.collective_rpc("kill_lane")
        found[name] = round_of(here)
    found["lanes at last"] = executor.collective_rpc("kind_of_lane")
    here.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
