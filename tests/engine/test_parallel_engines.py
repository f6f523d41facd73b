"""Engines of several engine cores, or of several pipeline stages: stock's tokens, and lanes where there may be any."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dev.child_process import ChildProcess
from tests.engine.conftest import Results
from tests.engine.harness.compare import first_difference
from tests.engine.harness.data_parallel import ONE_NUMA_NODE, SCENARIO
from tests.engine.harness.engines import AMPLE
from tests.engine.harness.processes import (
    ENVIRONMENT,
    NO_PLUGIN,
    OUR_PLUGIN,
    ROOT,
    run_side_by_side,
    wait_for,
    write_model,
)
from tests.engine.harness.scenarios import SCENARIOS
from tests.engine.harness.spec import OURS, EngineSpec

pytestmark = [pytest.mark.engine, pytest.mark.long]

TWO_STAGES = {
    **AMPLE,
    "pipeline_parallel_size": 2,
    # vLLM allocates what the second stage receives in a profile run, which on CPUs belongs to the compilation
    "enforce_eager": False,
    "compilation_config": {"mode": 2, "backend": "eager"},
}
ASKED = ("text", "images", "aborts")


class Served(NamedTuple):
    """A process that serves a scenario, and the file of its results."""

    process: ChildProcess
    results: Path

    def read(self) -> dict[str, Any]:
        if self.process.exit_code != 0:
            pytest.fail("\n".join(self.process.last_lines(40)))
        found: dict[str, Any] = json.loads(self.results.read_text())
        return found


@pytest.fixture(scope="module")
def two_engines(llava: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Stock and ours, each with two engine cores behind one front end (see `harness/data_parallel.py`)."""
    return served_by_two(llava, ("stock", "ours"), tmp_path_factory.mktemp("data_parallel"))


@pytest.fixture(scope="module")
def two_lenders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Stock, and ours with KV blocks lent to lanes, each with two engine cores, and pictures of 64 tokens."""
    model = write_model("llava", ROOT / ".models" / "llava-64-tokens", image_size=112)
    return served_by_two(model, ("stock", "lending"), tmp_path_factory.mktemp("data_parallel_lending"))


def served_by_two(model: Path, sides: tuple[str, ...], folder: Path) -> dict[str, dict[str, Any]]:
    with ExitStack() as stack:
        served = {}
        for side in sides:
            results = folder / f"{side}.json"
            program = [sys.executable, "-m", "tests.engine.harness.data_parallel", str(model), str(results), side]
            environment = {**ENVIRONMENT, **ONE_NUMA_NODE, **(NO_PLUGIN if side == "stock" else OUR_PLUGIN)}
            process = ChildProcess(program, log=folder / f"{side}.log", env=environment)
            served[side] = Served(stack.enter_context(process), results)
        wait_for(list(served.values()))  # type: ignore[arg-type]  # each has a process, which is all that is asked
        return {side: one.read() for side, one in served.items()}


def test_two_engine_cores_give_the_tokens_of_stock(two_engines: dict[str, dict[str, Any]]) -> None:
    assert first_difference(two_engines["stock"]["requests"], two_engines["ours"]["requests"]) is None
    assert two_engines["ours"]["requests"].keys() == {request.id for request in SCENARIOS[SCENARIO]().requests}


def test_each_engine_core_has_a_lane_of_its_own(two_engines: dict[str, dict[str, Any]]) -> None:
    lanes = two_engines["ours"]["lanes"]
    assert lanes.keys() == {"0", "1"}
    assert min(lanes.values()) > 0


def test_no_process_is_left_of_two_engine_cores(two_engines: dict[str, dict[str, Any]]) -> None:
    """A lane is a process and its fork server, so ours has four more than stock."""
    assert two_engines["ours"]["processes"] == two_engines["stock"]["processes"] + 4
    assert two_engines["ours"]["left"] == []


def test_two_engine_cores_that_lend_give_the_tokens_of_stock(two_lenders: dict[str, dict[str, Any]]) -> None:
    assert first_difference(two_lenders["stock"]["requests"], two_lenders["lending"]["requests"]) is None


def test_each_engine_core_lends_its_own_blocks_and_has_them_back(two_lenders: dict[str, dict[str, Any]]) -> None:
    ours = two_lenders["lending"]
    assert ours["loans"].keys() == {"0", "1"}
    assert min(ours["loans"].values()) > 0
    assert ours["lent"] == {"0": 0, "1": 0}


@pytest.fixture(scope="module")
def two_stages(llava: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Stock and ours, each with two pipeline stages and no lane."""
    spec = EngineSpec("pipeline-parallel", str(llava), ASKED, args=TWO_STAGES, processes=True)
    return Results(
        *run_side_by_side(
            tmp_path_factory.mktemp("pipeline_parallel"),
            [spec],
            [replace(spec, scheduler=OURS)],
            stock_environment=NO_PLUGIN,
            our_environment=OUR_PLUGIN,
        )
    )


@pytest.mark.parametrize("scenario", ASKED)
def test_two_pipeline_stages_give_the_tokens_of_stock(two_stages: Results, scenario: str) -> None:
    expected = two_stages.of_stock("pipeline-parallel", scenario)
    ours = two_stages.of_ours("pipeline-parallel", scenario)
    assert first_difference(expected["requests"], ours["requests"]) is None
    assert ours["still_there"] == []
