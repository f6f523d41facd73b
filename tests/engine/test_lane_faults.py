"""Bad luck in a real engine's encoder process: an encode that fails fails its request, a process that dies none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness.processes import IN_PROCESS, OUR_PLUGIN, run_program

pytestmark = pytest.mark.once

FAULTS = ("raises", "no memory")
DEATHS = ("dies", "dies without a successor")


@pytest.fixture(scope="module")
def rounds(llava: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return `{fault: {"tokens", "reasons", …}}`, all from one engine, in the order of `harness/lane_faults.py`."""
    log = tmp_path_factory.mktemp("lane_faults") / "log"
    found: dict[str, Any] = run_program(
        "tests.engine.harness.lane_faults", llava, environment=OUR_PLUGIN | IN_PROCESS, log=log
    )
    return found


def test_the_lane_is_warmed_up_while_the_engine_starts(rounds):
    assert rounds["warm-up"] == [None]


def test_without_a_fault_all_are_served_from_the_lane(rounds):
    calm = rounds["none"]
    assert set(calm["reasons"].values()) == {"length"}
    assert (calm["encoded"], calm["failed"], calm["restarts"]) == (4, 0, 0)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_request_of_that_picture_fails_and_no_other(rounds, fault):
    found, calm = rounds[fault], rounds["none"]
    assert {id_ for id_, reason in found["reasons"].items() if reason != "length"} == {"bad"}
    assert found["reasons"]["bad"] == "error"
    assert {id_: t for id_, t in found["tokens"].items() if id_ != "bad"} == {
        id_: t for id_, t in calm["tokens"].items() if id_ != "bad"
    }
    assert found["left"] == []


@pytest.mark.parametrize("death", DEATHS)
def test_a_picture_whose_process_died_is_encoded_in_the_step(rounds, death):
    found, calm = rounds[death], rounds["none"]
    assert found["reasons"] == calm["reasons"]
    assert found["tokens"] == calm["tokens"]
    assert found["left"] == []


def test_metrics_say_so_and_only_a_death_costs_a_process(rounds):
    kinds = (*FAULTS, *DEATHS)
    assert [rounds[kind]["failed"] for kind in kinds] == [1, 2, 2, 2]
    assert [rounds[kind]["restarts"] for kind in kinds] == [0, 0, 1, 2]
    assert [rounds[kind]["encoded"] for kind in kinds] == [7, 10, 14, 18]
