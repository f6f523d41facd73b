"""`python -m tests.engine.harness.main SPECS.json RESULTS.json`: run engines one after the other, write what came back.

RESULTS.json: `{engine: {"facts": {...}, "scenarios": {name: {...}}, "traces_of_ours": [...], "error": traceback}}`, the
error None if all went well. An engine that dies leaves the scenarios it had finished; the next one starts all the same.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

from dev.frozen_heap import freeze_for_good
from tests.engine.harness.absence import traces_of_ours
from tests.engine.harness.scenarios import SCENARIOS
from tests.engine.harness.spec import EngineSpec


def main(specs_file: str, results_file: str) -> None:
    specs = [EngineSpec(**spec) for spec in json.loads(Path(specs_file).read_text())]
    if any("hf_overrides" in spec.args for spec in specs):
        import_module("tests.engine.harness.models")
    results = {}
    for spec in specs:
        print(f"=== engine {spec.name}", flush=True)
        freeze_for_good()
        results[spec.name] = run_engine(spec)
        Path(results_file).write_text(json.dumps(results))


def run_engine(spec: EngineSpec) -> dict[str, Any]:
    result: dict[str, Any] = {"facts": {}, "scenarios": {}, "error": None}
    try:
        with _started(spec) as engine:
            result["facts"] = engine.facts
            for name in spec.scenarios:
                print(f"--- scenario {name}", flush=True)
                result["scenarios"][name] = engine.run(SCENARIOS[name]())
            result["traces_of_ours"] = traces_of_ours()
    except Exception:  # noqa: BLE001  whatever it is, the test that reads the results shows it
        result["error"] = traceback.format_exc()
        print(result["error"], flush=True)
    return result


@contextmanager
def _started(spec: EngineSpec) -> Iterator[Any]:
    if spec.processes:
        from tests.engine.harness.served import ServedEngine

        with closing(ServedEngine(spec)) as engine:
            yield engine
        return
    from tests.engine.harness.async_on_cpu import async_scheduling_on_cpu
    from tests.engine.harness.inproc import InProcessEngine

    with (
        async_scheduling_on_cpu() if spec.async_scheduling else nullcontext(),
        closing(InProcessEngine(spec)) as engine,
    ):
        yield engine


if __name__ == "__main__":
    main(*sys.argv[1:])
