"""`python -m tests.engine.shared_engines PLAN.json RESULT.json`: run engines in turn, and write their answers.

PLAN.json: `{"ours": bool, "meet": folder, "engines": number of processes, "cases": [Case with "folder"]}`. Before each
case all processes wait for each other, so that their engines get the same requests at the same time.
RESULT.json: `{case: {"answers": {id: Heard}, "counts": {outcome: number}, "again": counts of a second round}}`.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.engine.combinations.cases import Ask
from tests.engine.combinations.run import run_round
from tests.engine.harness.inproc import InProcessEngine
from tests.engine.harness.spec import OURS, EngineSpec
from vllm_omni_sched.engine.shared.attach import shared_planner

AT_MOST_SECONDS = 120.0


def main(plan_file: str, result_file: str) -> None:
    plan = json.loads(Path(plan_file).read_text())
    results = {}
    for case in plan["cases"]:
        spec = EngineSpec(
            case["name"],
            case["model"],
            (),
            scheduler=OURS if plan["ours"] else None,
            omni_sched=case["omni_sched"] if plan["ours"] else None,
            args=case["args"],
        )
        with closing(InProcessEngine(spec)) as here:
            asks = [Ask(**ask) for ask in case["asks"]]
            meet(Path(plan["meet"]), f"{case['name']}-begin", plan["engines"])
            first = run_round(here, asks)
            counts = counts_of(here)
            wait_until_written(here, len({number for ask in asks for number in ask.images}))
            empty_encoder_cache(here)
            second = run_round(here, asks)
            assert second["answers"] == first["answers"]
            after = counts_of(here)
            meet(Path(plan["meet"]), f"{case['name']}-end", plan["engines"])
        again = {name: after[name] - counts[name] for name in counts}
        results[case["name"]] = {"answers": first["answers"], "counts": counts, "again": again, "left": second["left"]}
        Path(result_file).write_text(json.dumps(results))


def counts_of(here: InProcessEngine) -> dict[str, int]:
    planner = shared_planner(here.core.scheduler)
    found = {} if planner is None else vars(planner.counts)
    return {name: count for name, count in found.items() if isinstance(count, int)}


def empty_encoder_cache(here: InProcessEngine) -> None:
    """Empty vLLM's encoder cache, which is no reset: after one, nothing that was encoded before is used."""
    here.core.scheduler.encoder_cache_manager.reset()
    here.core.model_executor.driver_worker.worker.model_runner.encoder_cache.clear()


def wait_until_written(here: InProcessEngine, encodings: int) -> None:
    """Wait until the store has so many encodings: a thread writes them."""
    planner = shared_planner(here.core.scheduler)
    end = time.monotonic() + AT_MOST_SECONDS
    while planner is not None and planner.store.use().encodings < encodings:
        if time.monotonic() > end:
            raise TimeoutError(f"{planner.store.use()} in the store, {encodings} encodings expected")
        time.sleep(0.001)


def meet(folder: Path, name: str, processes: int) -> None:
    """Wait until all processes have come here."""
    (folder / f"{name}.{time.monotonic_ns()}").touch()
    end = time.monotonic() + AT_MOST_SECONDS
    while len(list(folder.glob(f"{name}.*"))) < processes:
        if time.monotonic() > end:
            raise TimeoutError(f"the other engines did not come to {name}")
        time.sleep(0.001)


def plan_of(meet_in: Path, cases: list[dict[str, Any]], *, ours: bool, engines: int) -> dict[str, Any]:
    meet_in.mkdir(parents=True, exist_ok=True)
    return {"ours": ours, "meet": str(meet_in), "engines": engines, "cases": cases}


if __name__ == "__main__":
    main(*sys.argv[1:])
