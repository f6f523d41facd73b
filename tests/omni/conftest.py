"""Each pipeline is started once for each connector and mode, and answers all tests that ask about it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dev.omni_cpu.spec import TEXT_TO_SOUND, Mode
from tests.engine.harness.processes import ROOT, write_model
from tests.omni.connectors import REFERENCE, Connector
from tests.omni.harness.processes import Driver, Outcome
from tests.omni.harness.scenarios import SCENARIOS
from tests.omni.harness.spec import RunSpec

HERE = Path(__file__).parent
STOCK = (TEXT_TO_SOUND, "full_payload", REFERENCE)
STOCK_SCENARIOS = (*SCENARIOS, "undisturbed")
"""What vLLM-Omni alone is asked in one run, for the tests of connectors and for those of the stage scheduler."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = importlib.util.find_spec("vllm_omni") is None
    for item in items:
        if item.path.is_relative_to(HERE) and "ran" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.omni)
            if missing:
                item.add_marker(pytest.mark.skip(reason="vLLM-Omni is not installed"))


class Ran:
    """Runs pipelines when first asked for: `ran(pipeline, mode, connector)` returns the outcome."""

    def __init__(self, driver: Driver, folder: Path) -> None:
        self._driver = driver
        self._folder = folder
        self._outcomes: dict[str, Outcome] = {}

    def __call__(self, pipeline: str, mode: Mode, connector: Connector, **how: Any) -> Outcome:
        """Run a pipeline once and return its outcome. `how`: other fields of `RunSpec`."""
        if not how and (pipeline, mode, connector) == STOCK:
            how = {"scenarios": STOCK_SCENARIOS}
        name = "-".join([pipeline, mode, connector.name, *(f"{key}={value}" for key, value in how.items())])
        if name not in self._outcomes:
            folder = self._folder / f"{len(self._outcomes)}-{pipeline}"
            folder.mkdir()
            spec = RunSpec(pipeline, mode, connector.name, connector.extra(folder), **how)
            self._outcomes[name] = self._driver.run(spec)
        outcome = self._outcomes[name]
        if outcome.results["error"]:
            pytest.fail(f"{name}\n{outcome.results['error']}")
        return outcome

    def answers(self, pipeline: str, mode: Mode, connector: Connector, scenario: str) -> dict[str, Any]:
        answers: dict[str, Any] = self(pipeline, mode, connector).results["scenarios"][scenario]
        return answers


@pytest.fixture(scope="session")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    folder = tmp_path_factory.mktemp("omni")
    with Driver(write_model("llama", ROOT / ".models" / "llama"), folder) as driver:
        yield Ran(driver, folder)
