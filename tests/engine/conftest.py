"""Each set of engines is started once and answers all tests that ask about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.engine.harness.engines import VARIANTS, our_engines, our_served_engines, served_engine, stock_engines
from tests.engine.harness.processes import (
    ENVIRONMENT,
    IN_PROCESS,
    NO_PLUGIN,
    OUR_PLUGIN,
    ROOT,
    file_of_stock,
    run_side_by_side,
    write_model,
)
from tests.support import warm

HERE = Path(__file__).parent


FIXTURES_WITH_ENGINES = {"in_process", "apart", "in_processes", "servers", "refused_servers"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE) and FIXTURES_WITH_ENGINES.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.engine)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let one server import vLLM while the first tests run, for the engines of all processes that will be forked."""
    several = session.config.getoption("--processes", 1) > 1
    if several and any(item.get_closest_marker("engine") for item in session.items):
        warm.prepare(ENVIRONMENT)


class Results(NamedTuple):
    """Results of stock and ours: `{engine: {"facts": …, "scenarios": {name: …}, …}}` (see `harness/main.py`)."""

    stock: dict[str, Any]
    ours: dict[str, Any]

    def of_stock(self, engine: str, scenario: str) -> dict[str, Any]:
        return _scenario("stock", self.stock, engine, scenario)

    def of_ours(self, engine: str, scenario: str) -> dict[str, Any]:
        return _scenario("ours", self.ours, engine, scenario)


def _scenario(side: str, results: dict[str, Any], engine: str, scenario: str) -> dict[str, Any]:
    if engine not in results:
        pytest.fail(f"{side}: engine {engine!r} never ran\n{results.get('process')}")
    if scenario not in results[engine]["scenarios"]:
        pytest.fail(f"{side}: engine {engine!r} did not get through {scenario!r}\n{results[engine]['error']}")
    found: dict[str, Any] = results[engine]["scenarios"][scenario]
    return found


@pytest.fixture(scope="session")
def llava() -> Path:
    """Return the folder of a LLaVA of which a picture takes four tokens."""
    return write_model("llava", ROOT / ".models" / "llava-4-tokens", image_size=28)


@pytest.fixture(scope="session")
def voxtral() -> Path:
    return write_model("voxtral-realtime", ROOT / ".models" / "voxtral-realtime")


@pytest.fixture(scope="session")
def qwen2_vl() -> Path:
    return write_model("qwen2-vl", ROOT / ".models" / "qwen2-vl")


@pytest.fixture(scope="session")
def in_process(
    request: pytest.FixtureRequest, llava: Path, voxtral: Path, tmp_path_factory: pytest.TempPathFactory
) -> Results:
    """Run engines of `harness/engines.py` in one process for each side, with the same steps in every run.

    Of ours the long ones are run if long tests are selected, the others if others are; of stock those that ours are
    compared with.
    """
    tests = [test for test in request.session.items if "in_process" in getattr(test, "fixturenames", ())]
    wanted = {test.get_closest_marker("long") is not None for test in tests}
    environment = IN_PROCESS | NO_PLUGIN
    variants = [variant for variant in VARIANTS if variant.runs_long in wanted]
    engines = stock_engines(llava, voxtral, variants)
    stock, ours = run_side_by_side(
        tmp_path_factory.mktemp("in_process"),
        engines,
        our_engines(llava, voxtral, variants),
        stock_environment=environment,
        our_environment=IN_PROCESS | OUR_PLUGIN,
        kept=file_of_stock("in_process_long" if wanted == {True} else "in_process", engines, environment),
    )
    return Results(stock, ours)


@pytest.fixture(scope="session")
def in_processes(llava: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Run the engine as `vllm serve` starts it on a CPU: front end, engine core and worker in three processes."""
    engines = [served_engine(llava)]
    stock, ours = run_side_by_side(
        tmp_path_factory.mktemp("in_processes"),
        engines,
        our_served_engines(llava),
        stock_environment=NO_PLUGIN,
        kept=file_of_stock("in_processes", engines, NO_PLUGIN),
        our_environment={},  # whatever plugins are installed: in one of the two environments vLLM-Omni's too
    )
    return Results(stock, ours)
