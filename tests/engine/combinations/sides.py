"""Run cases on stock and on ours, each side in a process of its own; stock's answers are kept for later runs."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from dev.child_process import ChildProcess
from tests.engine.combinations.cases import Case
from tests.engine.harness.processes import (
    ENVIRONMENT,
    IN_PROCESS,
    NO_PLUGIN,
    OUR_PLUGIN,
    ROOT,
    file_of_stock,
    keep,
    wait_for,
    write_model,
)
from tests.engine.harness.spec import EngineSpec
from tests.support.warm import WarmPopen

MODELS = {"llava": {"image_size": 28}}
NAMES = ("llava", "eagle", "lora", "qwen2-audio", "qwen2-vl", "qwen2.5-vl")


class Side:
    """One process that runs cases one after the other."""

    def __init__(self, name: str, cases: Sequence[dict[str, Any]], folder: Path) -> None:
        self.name = name
        self._results = folder / f"{name}.json"
        cases_file = folder / f"{name}.cases.json"
        cases_file.write_text(json.dumps(cases))
        self._results.write_text("{}")
        self.process = ChildProcess(
            [sys.executable, "-m", "tests.engine.combinations.run", str(cases_file), str(self._results), name],
            log=folder / f"{name}.log",
            env={**ENVIRONMENT, **IN_PROCESS, **(NO_PLUGIN if name == "stock" else OUR_PLUGIN)},
            start=WarmPopen,
        )

    def results(self) -> dict[str, Any]:
        """Return what it has written; the end of its log is `process` if it did not end well."""
        results: dict[str, Any] = json.loads(self._results.read_text())
        if self.process.exit_code != 0:
            results["process"] = "\n".join(self.process.last_lines(40))
        return results


def models_of(cases: Sequence[Case]) -> dict[str, str]:
    """Write the models that these cases need; return their folders by name."""
    asked = json.dumps([case.to_json() for case in cases])
    return {
        name: str(write_model(name, ROOT / ".models" / _folder(name), **MODELS.get(name, {})))
        for name in NAMES
        if f'"{name}"' in asked
    }


def _folder(name: str) -> str:
    return "llava-4-tokens" if name == "llava" else name


def with_models(case: Case, models: dict[str, str]) -> dict[str, Any]:
    """Return a case as plain data, with folders in place of the names of models."""
    plain = case.to_json()
    plain["model"] = models[plain["model"]]
    draft = plain["args"].get("speculative_config", {})
    if "model" in draft:
        plain["args"]["speculative_config"] = {**draft, "model": models[draft["model"]]}
    plain["asks"] = [{**ask, "lora": ask["lora"] and models[ask["lora"]]} for ask in plain["asks"]]
    return plain


def run_cases(folder: Path, cases: Sequence[Case]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the results of stock and of ours (see `run.py`)."""
    folder.mkdir(parents=True, exist_ok=True)
    models = models_of(cases)
    plain = [with_models(case, models) for case in cases]
    kept = _file_of_stock(plain)
    with ExitStack() as stack:
        ours = Side("ours", plain, folder)
        stack.enter_context(ours.process)
        if kept.is_file():
            wait_for([ours])  # type: ignore[list-item]  # it has a process, which is all that is asked
            return json.loads(kept.read_text()), ours.results()
        stock = Side("stock", plain, folder)
        stack.enter_context(stock.process)
        wait_for([stock, ours])  # type: ignore[list-item]
        results = stock.results()
        if "process" not in results and all(one["error"] is None for one in results.values()):
            keep(results, kept)
        return results, ours.results()


def _file_of_stock(plain: Sequence[dict[str, Any]]) -> Path:
    """Return where stock's answers to these cases are kept: its name changes with all that they depend on."""
    files = ("cases.py", "run.py", "../harness/models.py")
    sources = b"".join((Path(__file__).parent / name).read_bytes() for name in files)
    folders = {case["model"] for case in plain} | {ask["lora"] for case in plain for ask in case["asks"] if ask["lora"]}
    folders |= {draft["model"] for case in plain if "model" in (draft := case["args"].get("speculative_config", {}))}
    specs = [EngineSpec("model", folder, ()) for folder in sorted(folders)]
    names = hashlib.sha256(sources + json.dumps([case["name"] for case in plain]).encode()).hexdigest()
    which = hashlib.sha256(json.dumps([case["name"] for case in plain]).encode()).hexdigest()[:6]
    return file_of_stock(f"combinations-{which}", specs, {"SOURCES": names})
