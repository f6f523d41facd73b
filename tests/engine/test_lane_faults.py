"""Bad luck in a real engine's encoder process: an encode that fails fails its request, a process that dies none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness.processes import ENVIRONMENT, IN_PROCESS, OUR_PLUGIN, ROOT

pytestmark = pytest.mark.once

FAULTS = ("raises", "no memory")
DEATHS = ("dies", "dies without a successor")


@pytest.fixture(scope="module")
def rounds(llava: Path) -> dict[str, Any]:
    """Return `{fault: {"tokens", "reasons", …}}`, all from one engine, in the order of `harness/lane_faults.py`."""
    answer = subprocess.run(
        [sys.executable, "-m", "tests.engine.harness.lane_faults", str(llava)],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, **OUR_PLUGIN, **IN_PROCESS},
        stdout=subprocess.PIPE,
        check=True,
        timeout=300,
    )
    found: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
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
