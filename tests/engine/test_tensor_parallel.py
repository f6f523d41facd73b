"""Encode-ahead in real engines with tensor parallelism: stock's tokens, whatever becomes of the lanes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import Results
from tests.engine.harness.compare import first_difference
from tests.engine.harness.processes import (
    IN_PROCESS,
    NO_PLUGIN,
    OUR_PLUGIN,
    file_of_stock,
    run_program,
    run_side_by_side,
)
from tests.engine.harness.scenarios import SCENARIOS
from tests.engine.harness.spec import OURS
from tests.engine.harness.tensor_parallel import ALL_AHEAD, FAULTS, NO_LANE, NO_LANE_SCENARIOS, no_lane, stock
from tests.engine.harness.tensor_parallel import SCENARIOS as ASKED

pytestmark = [pytest.mark.engine, pytest.mark.newest]

DATA = pytest.param("data", marks=pytest.mark.long)
LOST = ("one dies", "one dies when it is done", "one dies in its sleep", "no lane")


@pytest.fixture(scope="module", params=["weights", DATA])
def answers(request: pytest.FixtureRequest, llava: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The answers of stock and of ours, both with two workers that share out the encoder in this way."""
    mode: str = request.param
    spec = stock(llava, mode)
    ours = [replace(spec, scheduler=OURS, omni_sched=ALL_AHEAD)]
    if mode == "weights":
        ours.append(no_lane(llava))
    return Results(
        *run_side_by_side(
            folder_of(tmp_path_factory, mode),
            [spec],
            ours,
            stock_environment=IN_PROCESS | NO_PLUGIN,
            our_environment=IN_PROCESS | OUR_PLUGIN,
            kept=file_of_stock(spec.name, [spec], IN_PROCESS | NO_PLUGIN),
        )
    )


def folder_of(factory: pytest.TempPathFactory, mode: str) -> Path:
    """Return the folder with the logs of both sides."""
    folder = factory.getbasetemp() / f"tensor-parallel-{mode}"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.mark.parametrize("scenario", ASKED)
def test_same_tokens(answers: Results, scenario: str) -> None:
    engine, *_ = answers.ours
    expected = answers.of_stock(engine, scenario)["requests"]
    assert first_difference(expected, answers.of_ours(engine, scenario)["requests"]) is None


@pytest.mark.parametrize("scenario", ASKED)
def test_every_request_leaves_exactly_once(answers: Results, scenario: str) -> None:
    engine, *_ = answers.ours
    ran = answers.of_ours(engine, scenario)
    assert ran["left"] == {request.id: 1 for request in SCENARIOS[scenario]().requests}
    assert ran["still_there"] == []


def test_the_lanes_were_used(answers: Results) -> None:
    engine, *_ = answers.ours
    assert answers.of_ours(engine, "images")["tiers"]["lane"] > 20


def test_a_profile_goes_on_where_only_the_loaded_model_shows_that_there_can_be_no_lane(
    answers: Results, tmp_path_factory: pytest.TempPathFactory
) -> None:
    engine, *more = answers.ours
    if not more:
        pytest.skip("one way to share out the encoder is enough")
    for scenario in NO_LANE_SCENARIOS:
        expected = answers.of_stock(engine, scenario)["requests"]
        ran = answers.of_ours(NO_LANE, scenario)
        assert first_difference(expected, ran["requests"]) is None
        assert (ran["tiers"]["lane"], ran["tiers"]["miss"] > 0, ran["still_there"]) == (0, True, [])
    log = (folder_of(tmp_path_factory, "weights") / "ours.log").read_text()
    assert log.count("LlavaThatKeepsItsGroup.group of its encoder is a process group of the worker") == 2
    assert "Encode-ahead stops" not in log


@pytest.fixture(scope="module", params=["weights", "data"])
def rounds(request: pytest.FixtureRequest, llava: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """`{fault: {"tokens", "reasons", …}}`, all from one engine, in the order of `FAULTS`."""
    log = tmp_path_factory.mktemp("faults") / "log"
    found: dict[str, Any] = run_program(
        "tests.engine.harness.tensor_parallel", llava, request.param, environment=OUR_PLUGIN | IN_PROCESS, log=log
    )
    return found


@pytest.mark.long
def test_without_a_fault_all_are_served_from_the_lanes(rounds: dict[str, Any]) -> None:
    calm = rounds["none"]
    assert set(calm["reasons"].values()) == {"length"}
    assert (calm["encoded"], calm["failed"], calm["restarts"]) == (4, 0, 0)


@pytest.mark.long
@pytest.mark.parametrize("fault", LOST)
def test_no_request_notices_a_lost_lane(rounds: dict[str, Any], fault: str) -> None:
    found, calm = rounds[fault], rounds["none"]
    assert found["reasons"] == calm["reasons"]
    assert found["tokens"] == calm["tokens"]
    assert found["left"] == []


@pytest.mark.long
@pytest.mark.parametrize("fault", ["one raises", "all raise"])
def test_the_request_of_a_picture_that_cannot_be_encoded_fails_and_no_other(rounds: dict[str, Any], fault: str) -> None:
    found, calm = rounds[fault], rounds["none"]
    assert {id_ for id_, reason in found["reasons"].items() if reason != "length"} == {"bad"}
    assert {id_: t for id_, t in found["tokens"].items() if id_ != "bad"} == {
        id_: t for id_, t in calm["tokens"].items() if id_ != "bad"
    }
    assert found["left"] == []


@pytest.mark.long
def test_only_deaths_cost_a_process_and_the_last_one_ends_the_lanes(rounds: dict[str, Any]) -> None:
    restarts = {name: rounds[name]["restarts"] for name in FAULTS}
    expected = dict.fromkeys(FAULTS, 2) | {"none": 0, "one dies": 1} | dict.fromkeys(FAULTS[-2:], 3)
    assert {name: restarts[name] for name in FAULTS[:-1]} == {name: expected[name] for name in FAULTS[:-1]}
    assert rounds["lanes at last"] == ["InlineLane", "InlineLane"]
