"""A pipeline that ends in a diffusion stage, scheduled: the same pictures as vLLM-Omni alone, drawn once for all."""

from __future__ import annotations

from typing import Any

import pytest

from dev.omni_cpu.spec import TEXT_TO_PICTURE
from tests.omni.conftest import Ran
from tests.omni.connectors import REFERENCE
from tests.omni.harness.picture_scenarios import CROWD, DRAWS, MANY, PICTURE_SCENARIOS

pytestmark = pytest.mark.slow


def stock(ran: Ran) -> dict[str, Any]:
    """What vLLM-Omni alone draws."""
    outcome = ran(TEXT_TO_PICTURE, "full_payload", REFERENCE, scenarios=("pictures",))
    answers: dict[str, Any] = outcome.results["scenarios"]["pictures"]["answers"]
    return answers


def scheduled(ran: Ran) -> dict[str, Any]:
    outcome = ran(
        TEXT_TO_PICTURE, "full_payload", REFERENCE, scheduling={}, replicas=2, scenarios=tuple(PICTURE_SCENARIOS)
    )
    return outcome.results


def assert_as_stock(ran: Ran, answers: dict[str, Any]) -> None:
    """`house 3` is answered as `house`."""
    alone = stock(ran)
    wanted = {name: alone[name if name in alone else name.rpartition(" ")[0]] for name in answers}
    assert answers == wanted


def test_pictures_differ(ran: Ran):
    """Pictures must differ, else comparing them would prove nothing."""
    answers = stock(ran)
    assert {(answer["ends"], len(answer["pictures"])) for answer in answers.values()} == {(1, 1)}
    assert len({tuple(answer["pictures"][0]) for answer in answers.values()}) == len(DRAWS | CROWD)
    sizes = {name: answers[name]["pictures"][0][:2] for name in DRAWS}
    assert sizes == {name: [draw.side, draw.side] for name, draw in DRAWS.items()}


def test_same_pictures_as_stock(ran: Ran):
    assert_as_stock(ran, scheduled(ran)["scenarios"]["pictures"]["answers"])


def test_what_many_ask_is_drawn_once(ran: Ran):
    found = scheduled(ran)["scenarios"]["same_pictures"]
    assert len(found["answers"]) == MANY + 2
    assert found["submitted"] == {"0": 2, "1": 2}
    assert_as_stock(ran, found["answers"])


def test_one_text_for_pictures_that_differ(ran: Ran):
    """In seed, steps or size: the text stage runs once for all of them, the diffusion stage once for each."""
    found = scheduled(ran)["scenarios"]["one_prompt"]
    assert found["submitted"] == {"0": 1, "1": len(found["answers"]) / 2}
    assert_as_stock(ran, found["answers"])


def test_without_a_seed_everybody_gets_a_picture_of_its_own(ran: Ran):
    found = scheduled(ran)["scenarios"]["no_seed"]
    assert found["submitted"] == {"0": 1, "1": len(found["answers"])}
    assert len({answer["pictures"][0][2] for answer in found["answers"].values()}) == len(found["answers"])


def test_the_balancer_knows_pixels_and_steps(ran: Ran):
    known = scheduled(ran)["scenarios"]["picture_costs"]["known"]
    assert {name: tuple(found[:2]) for name, found in known.items()} == {
        name: (draw.side**2, draw.steps) for name, draw in DRAWS.items()
    }
    assert all(seconds > 0 for _, _, seconds in known.values())


def test_all_are_answered_though_a_replica_is_killed(ran: Ran):
    found = scheduled(ran)["scenarios"]["painter_killed"]
    assert found["lost"] >= 1
    for answers in (found["answers"], found["again"]):  # the replica being back
        assert answers.keys() == CROWD.keys()
        assert_as_stock(ran, answers)


def test_nothing_is_left(ran: Ran):
    results = scheduled(ran)
    assert (results["children_left"], results["shm_left"]) == ([], [])
