"""Stages that branch answer as the lines that their branches are, in a vLLM-Omni that runs."""

from __future__ import annotations

from typing import Any

import pytest

from dev.omni_cpu.asking import echoes
from dev.omni_cpu.compare import first_difference
from dev.omni_cpu.spec import BRANCHES, TEXT_TO_SOUND
from tests.omni.conftest import Ran
from tests.omni.connectors import CONNECTORS, REFERENCE
from tests.omni.harness.branch_scenarios import BRANCH_SCENARIOS, MANY

pytestmark = pytest.mark.slow

FRAME_SAMPLES = 4  # of dev/omni_cpu/models.py
ECHO = 2
PATIENT = {"batching": {"target_latency_ms": 60_000.0}}
AUTO = next(connector for connector in CONNECTORS if connector.name == "OmniAutoConnector")


def alone(ran: Ran) -> dict[str, Any]:
    """Return what vLLM-Omni alone answers on the line thinker → talker → vocoder."""
    found: dict[str, Any] = ran(TEXT_TO_SOUND, "full_payload", REFERENCE, scenarios=("many",)).results["scenarios"]
    answers: dict[str, Any] = found["many"]["answers"]
    return answers


def branching(ran: Ran) -> dict[str, Any]:
    outcome = ran(
        BRANCHES,
        "full_payload",
        AUTO,
        scheduling=PATIENT,
        replicas=2,
        replicated=ECHO,
        scenarios=tuple(BRANCH_SCENARIOS),
    )
    found: dict[str, Any] = outcome.results
    return found


def expected(ran: Ran, names: Any) -> dict[str, Any]:
    """Both talkers are the same model: the second one says the first codes of the first one."""
    wanted = {}
    for name in names:
        answer = alone(ran)[name]
        codes = [int(code) for code in answer["sound"][::FRAME_SAMPLES]]
        said = codes[: echoes(MANY[name])]
        wanted[name] = {
            "text": {"0": answer["text"]["0"], str(ECHO): said},
            "sound": [*answer["sound"], *map(float, said)],
        }
    return wanted


def assert_each_output_once(answers: dict[str, Any]) -> None:
    assert {tuple(sorted(answer["ends"].items())) for answer in answers.values()} == {(("0", 1), ("2", 1), ("3", 1))}


def test_all_outputs_are_those_of_the_branches_alone(ran: Ran):
    found = branching(ran)["scenarios"]["many"]
    assert found["submitted"] == dict.fromkeys("0123", len(MANY))
    assert first_difference(expected(ran, MANY), found["answers"]) is None
    assert_each_output_once(found["answers"])


def test_only_the_stages_that_the_asked_outputs_need_run(ran: Ran):
    found = branching(ran)["scenarios"]["only_text"]
    asked = len(found["answers"])
    assert found["submitted"] == {"0": asked, "1": 0, "2": asked, "3": 0}
    wanted = {name: {"text": answer["text"]} for name, answer in expected(ran, found["answers"]).items()}
    assert first_difference(wanted, found["answers"]) is None


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


def test_nothing_is_left(ran: Ran):
    results = branching(ran)
    assert (results["children_left"], results["shm_left"]) == ([], [])
