"""Stages that branch answer as the lines that their branches are, in a vLLM-Omni that runs."""

from __future__ import annotations

from typing import Any

import pytest

from dev.omni_cpu.asking import echoes
from dev.omni_cpu.compare import first_difference
from dev.omni_cpu.spec import BRANCHES, MODES, SPEECH_AND_PICTURE, TEXT_TO_PICTURE, TEXT_TO_SOUND, Mode
from tests.omni.conftest import Ran
from tests.omni.connectors import CONNECTORS, REFERENCE
from tests.omni.harness.branch_scenarios import BRANCH_SCENARIOS, EQUAL, FEW, MANY, SPOKEN

pytestmark = pytest.mark.slow

FRAME_SAMPLES = 4  # of dev/omni_cpu/models.py
ECHO = 2
AUTO = next(connector for connector in CONNECTORS if connector.name == "OmniAutoConnector")
IN_LONG = {"many", "branch_killed"}
"""Scenarios with 64 requests; in async-chunk mode they are run by themselves, in the long tests."""

both = pytest.mark.parametrize("mode", MODES)


def alone(ran: Ran) -> dict[str, Any]:
    """Return what vLLM-Omni alone answers on the line thinker → talker → vocoder."""
    found: dict[str, Any] = ran(TEXT_TO_SOUND, "full_payload", REFERENCE, scenarios=("many",)).results["scenarios"]
    answers: dict[str, Any] = found["many"]["answers"]
    return answers


def branching(ran: Ran, mode: Mode = "full_payload", scenarios: Any = tuple(BRANCH_SCENARIOS)) -> dict[str, Any]:
    outcome = ran(BRANCHES, mode, AUTO, scheduling={}, replicas=2, replicated=ECHO, scenarios=scenarios)
    found: dict[str, Any] = outcome.results
    return found


def shortly(ran: Ran, mode: Mode) -> dict[str, Any]:
    """Ask what takes a short time in async-chunk mode; otherwise all."""
    if mode == "full_payload":
        return branching(ran)
    return branching(ran, mode, tuple(one for one in BRANCH_SCENARIOS if one not in IN_LONG))


def expected(ran: Ran, names: Any) -> dict[str, Any]:
    """Both talkers are the same model: the second one says the first codes of the first one."""
    wanted = {}
    for name in names:
        asked = name.partition("/")[0]
        answer = alone(ran)[asked]
        codes = [int(code) for code in answer["sound"][::FRAME_SAMPLES]]
        said = codes[: echoes(MANY[asked])]
        wanted[name] = {
            "text": {"0": answer["text"]["0"], str(ECHO): said},
            "sound": [*answer["sound"], *map(float, said)],
        }
    return wanted


def assert_each_output_once(answers: dict[str, Any]) -> None:
    assert {tuple(sorted(answer["ends"].items())) for answer in answers.values()} == {(("0", 1), ("2", 1), ("3", 1))}


@both
def test_outputs_are_those_of_the_branches_alone(ran: Ran, mode: Mode):
    found = shortly(ran, mode)["scenarios"]["few"]
    assert found["submitted"] == dict.fromkeys("0123", len(FEW))
    assert first_difference(expected(ran, FEW), found["answers"]) is None
    assert_each_output_once(found["answers"])


def test_many_outputs_are_those_of_the_branches_alone(ran: Ran):
    found = branching(ran)["scenarios"]["many"]
    assert found["submitted"] == dict.fromkeys("0123", len(MANY))
    assert first_difference(expected(ran, MANY), found["answers"]) is None
    assert_each_output_once(found["answers"])


@both
def test_equal_requests_run_once_in_every_stage(ran: Ran, mode: Mode):
    """Equal in what their clients get as well: half of them get each token once, and the others all each time."""
    found = shortly(ran, mode)["scenarios"]["merged_in_branches"]
    assert len(found["answers"]) == EQUAL * len(FEW)
    assert found["submitted"] == dict.fromkeys("0123", 2 * len(FEW))
    assert first_difference(expected(ran, found["answers"]), found["answers"]) is None


@both
def test_only_the_stages_that_the_asked_outputs_need_run(ran: Ran, mode: Mode):
    found = shortly(ran, mode)["scenarios"]["only_text"]
    asked = len(found["answers"])
    assert found["submitted"] == {"0": asked, "1": 0, "2": asked, "3": 0}
    wanted = {name: {"text": answer["text"]} for name, answer in expected(ran, found["answers"]).items()}
    assert first_difference(wanted, found["answers"]) is None


@both
def test_equal_requests_hear_nothing_twice_though_the_first_stage_is_killed_while_it_speaks(ran: Ran, mode: Mode):
    found = shortly(ran, mode)["scenarios"]["thinker_killed"]
    assert len(found["answers"]) > found["submitted"]["0"]
    wanted = {name: found["undisturbed"][name.partition("/")[0]] for name in found["answers"]}
    assert first_difference(wanted, found["answers"]) is None
    assert_each_output_once(found["answers"])


def test_all_are_answered_though_a_replica_of_a_branch_is_killed(ran: Ran):
    """The branch beside it is not disturbed: its talker runs once for each request."""
    found = branching(ran)["scenarios"]["branch_killed"]
    assert found["lost"] > 1
    assert first_difference(expected(ran, MANY), found["answers"]) is None
    assert_each_output_once(found["answers"])
    assert found["submitted"]["1"] == len(MANY)
    assert found["submitted"]["0"] <= len(MANY) + found["lost"]
    assert first_difference(expected(ran, found["again"]), found["again"]) is None  # the replica being back
    assert_each_output_once(found["again"])


@both
def test_nothing_is_left(ran: Ran, mode: Mode):
    results = shortly(ran, mode)
    assert (results["children_left"], results["shm_left"]) == ([], [])


@pytest.mark.long
def test_many_that_exchange_chunks_are_answered_as_the_branches_alone_also_after_a_death(ran: Ran):
    results = branching(ran, "async_chunk", ("many", "branch_killed"))
    found = results["scenarios"]["many"]
    assert found["submitted"] == dict.fromkeys("0123", len(MANY))
    assert first_difference(expected(ran, MANY), found["answers"]) is None
    assert_each_output_once(found["answers"])
    killed = results["scenarios"]["branch_killed"]
    assert killed["lost"] > 1
    assert first_difference(expected(ran, MANY), killed["answers"]) is None
    assert_each_output_once(killed["answers"])
    assert killed["submitted"]["0"] <= len(MANY) + killed["lost"]
    assert first_difference(expected(ran, killed["again"]), killed["again"]) is None
    assert (results["children_left"], results["shm_left"]) == ([], [])


def test_speech_streams_while_a_picture_waits_for_the_whole_text(ran: Ran):
    """Thinker → talker → vocoder exchange chunks; thinker → diffusion stage passes through the front end."""
    outcome = ran(SPEECH_AND_PICTURE, "async_chunk", AUTO, scheduling={}, scenarios=("spoken_pictures",))
    found = outcome.results["scenarios"]["spoken_pictures"]
    assert found["submitted"] == dict.fromkeys("0123", len(SPOKEN))
    spoken = ran(TEXT_TO_SOUND, "async_chunk", REFERENCE, scenarios=("spoken",)).results["scenarios"]["spoken"]
    drawn = ran(TEXT_TO_PICTURE, "full_payload", REFERENCE, scenarios=("pictures",)).results["scenarios"]["pictures"]
    wanted = {
        name: {
            "text": {"0": spoken["answers"][name]["text"]["0"]},
            "sound": spoken["answers"][name]["sound"],
            "pictures": drawn["answers"][name]["pictures"],
        }
        for name in SPOKEN
    }
    assert first_difference(wanted, found["answers"]) is None
    assert (outcome.results["children_left"], outcome.results["shm_left"]) == ([], [])
