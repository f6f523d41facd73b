"""A vLLM-Omni whose stages are scheduled answers as vLLM-Omni does, runs the same work once, and outlives replicas."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dev.omni_cpu.compare import first_difference
from dev.omni_cpu.spec import MODES, TEXT_TO_SOUND, Mode
from tests.omni.conftest import Ran
from tests.omni.connectors import REFERENCE
from tests.omni.harness.move_scenarios import MOVE_SCENARIOS
from tests.omni.harness.refused_scenario import PATHS, REFUSED, REFUSED_SCENARIO
from tests.omni.harness.scenarios import SCENARIOS
from tests.omni.harness.stage_scenarios import CROWD, FULL, LIMITED, STAGE_SCENARIOS

pytestmark = pytest.mark.slow

REPLICAS = 2  # of the talker
PATIENT = {"runtime": {"drain_seconds": 600.0}}
DEATHS = ("killed_0", "killed_1")
AS_STOCK = tuple(name for name in STAGE_SCENARIOS if name not in ("undisturbed", "crowded", "limited"))
SCHEDULED = {
    "full_payload": (*SCENARIOS, *MOVE_SCENARIOS, *AS_STOCK),
    "async_chunk": (*SCENARIOS, *AS_STOCK, *REFUSED_SCENARIO),
}

in_both_modes = pytest.mark.parametrize("mode", MODES)


def stock(ran: Ran, scenario: str) -> dict[str, Any]:
    """Return what vLLM-Omni alone answers; the same in both modes (`test_chunks_say_what_whole_payloads_say`)."""
    return ran(TEXT_TO_SOUND, "full_payload", REFERENCE).results["scenarios"][scenario]


def scheduled(ran: Ran, mode: Mode) -> dict[str, Any]:
    outcome = ran(
        TEXT_TO_SOUND,
        mode,
        REFERENCE,
        scheduling=PATIENT,
        replicas=REPLICAS,
        replicated=1,
        scenarios=SCHEDULED[mode],
    )
    return outcome.results


def expected(ran: Ran, answers: dict[str, Any]) -> dict[str, Any]:
    """`merged 3` is answered as `merged`."""
    undisturbed = stock(ran, "undisturbed")["answers"]
    return {name: undisturbed[name if name in undisturbed else name.rpartition(" ")[0]] for name in answers}


def assert_as_stock(ran: Ran, answers: dict[str, Any]) -> None:
    wanted = expected(ran, answers)
    assert first_difference(wanted, answers) is None
    assert {name: answer["ends"] for name, answer in answers.items()} == {
        name: answer["ends"] for name, answer in wanted.items()
    }


@pytest.mark.parametrize("scenario", SCENARIOS)
@in_both_modes
def test_same_answers_as_stock(ran: Ran, mode: Mode, scenario: str):
    alone = stock(ran, "one_by_one")
    wanted = alone | ({"afterwards": alone["short"]} if scenario == "one_leaves" else {})
    assert first_difference(wanted, scheduled(ran, mode)["scenarios"][scenario]) is None


def crowd(ran: Ran, mode: Mode, scheduling: dict[str, Any] | None, scenario: str = "crowded") -> dict[str, Any]:
    """Ask more requests at a time than a stage runs."""
    outcome = ran(TEXT_TO_SOUND, mode, REFERENCE, scheduling=scheduling, max_num_seqs=FULL, scenarios=(scenario,))
    return outcome.results["scenarios"][scenario]


def lengths(found: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Return the tokens of each answer. Which tokens they are depends on the batch: stock differs from run to run."""
    return {name: {stage: len(of) for stage, of in one["text"].items()} for name, one in found["answers"].items()}


@in_both_modes
def test_with_default_options_stages_run_as_many_requests_at_once_as_stock(ran: Ran, mode: Mode):
    """A step of either has the stage's own `max_num_seqs`: nothing else limits how many run."""
    alone, ours = crowd(ran, "full_payload", None), crowd(ran, mode, {})
    assert lengths(alone) == lengths(ours)
    assert [alone["widest"][stage] for stage in "01"] == [FULL, FULL]
    assert [ours["widest"][stage] for stage in "01"] == [FULL, FULL]
    assert alone["prefills"]["0"] > 2


def test_a_target_limits_the_requests_without_an_output_and_no_others(ran: Ran):
    """No request meets this target, so the limit stays at its least; those that decode go on beside the one."""
    target = {"batching": {"stages": {0: {"target_latency_ms": 1, "max_batch_size": 2}}}}
    ours = crowd(ran, "full_payload", target, "limited")
    assert lengths(ours) == {name: {"0": ask.thinks} for name, ask in LIMITED.items()}
    assert ours["prefills"]["0"] <= 2
    assert ours["widest"]["0"] > 4


@in_both_modes
def test_what_many_ask_runs_once_in_every_stage(ran: Ran, mode: Mode):
    found = scheduled(ran, mode)["scenarios"]["merged"]
    assert found["submitted"] == {"0": 2, "1": 2, "2": 2}
    assert_as_stock(ran, found["answers"])


@in_both_modes
def test_those_that_part_get_answers_of_their_own(ran: Ran, mode: Mode):
    """The thinker runs once for all with whole payloads; with chunks requests share all stages or none."""
    found = scheduled(ran, mode)["scenarios"]["parting"]
    assert found["submitted"] == {"0": 1 if mode == "full_payload" else 2, "1": 2, "2": 2}
    assert_as_stock(ran, found["answers"])
    assert len(found["answers"]["merged 0"]["sound"]) > len(found["answers"]["parted 0"]["sound"])


@in_both_modes
def test_the_work_of_one_that_leaves_goes_on_for_others(ran: Ran, mode: Mode):
    found = scheduled(ran, mode)["scenarios"]["handed_over"]
    assert found["submitted"] == {"0": 1, "1": 1, "2": 1}
    assert_as_stock(ran, found["answers"])


@pytest.mark.parametrize("death", DEATHS)
@in_both_modes
def test_all_are_answered_though_a_replica_is_killed(ran: Ran, mode: Mode, death: str):
    found = scheduled(ran, mode)["scenarios"][death]
    assert found["lost"] > 1
    assert found["answers"].keys() == CROWD.keys()
    assert_as_stock(ran, found["answers"])
    assert_as_stock(ran, found["again"])  # the replica being back


def test_what_is_held_for_a_dead_replica_is_not_made_again(ran: Ran):
    """The thinker, which lives, runs again only what the talker's dead replica had got, or had perhaps not sent on."""
    found = scheduled(ran, "full_payload")["scenarios"]["killed_1"]
    lost, held = set(found["looked_for"]), set(found["held"])
    assert len(lost) >= 1
    assert held <= lost
    made_again = found["submitted"]["0"] - len(CROWD)
    assert len(lost - held) <= made_again <= len((lost - held) | set(found["unsent"]))


def test_all_are_answered_while_a_replica_moves(ran: Ran):
    """The replica moves to another stage and back, and then to another device."""
    found = scheduled(ran, "full_payload")["scenarios"]["moved"]
    assert found["outcomes"] == ["moved"] * 3
    assert found["live"] == [[[0, 1], [0], [0]], [[0], [0, 1], [0]], [[0], [0, 1], [0]]]
    assert found["stopped"] == [True] * 3
    assert len(found["cores"]) == 1
    for answers in found["answers"]:
        assert answers.keys() == CROWD.keys()
        assert_as_stock(ran, answers)
        assert {tuple(answer["ends"].values()) for answer in answers.values()} == {(1, 1)}


def test_what_makes_no_sense_is_refused_before_an_answer_begins(ran: Ran):
    """The error is vLLM's error of validation, which its servers answer with HTTP 400."""
    said = scheduled(ran, "async_chunk")["scenarios"]["refused"]["said"]
    assert {error for error, _ in said.values()} == {"VLLMValidationError"}
    assert "omni_class is 'vip', which is not an SLA class: it must be one of interactive, batch" in said["unknown"][1]
    assert "may not ask for (option 'graph.priority.client_classes')" in said["not allowed"][1]
    assert "unknown key 'omni_usr': did you mean 'omni_user'?" in said["misspelt"][1]


def test_what_makes_no_sense_is_answered_with_http_400(ran: Ran):
    """By the server of `vllm serve --omni`; what makes sense is served."""
    says = {
        "unknown": "omni_class is 'vip', which is not an SLA class: it must be one of interactive, batch",
        "not allowed": "may not ask for (option 'graph.priority.client_classes')",
        "misspelt": "unknown key 'omni_usr': did you mean 'omni_user'?",
    }
    asked = scheduled(ran, "async_chunk")["scenarios"]["refused_over_http"]["asked"]
    assert {path for path, *_ in asked} == set(PATHS)
    for path, stream, case, status, answer in asked:
        expected = 400 if case in REFUSED else 200
        assert status == expected, (path, stream, case, answer)
        if case in REFUSED:
            assert says[case] in json.loads(answer)["error"]["message"]
        else:
            assert '"error":{' not in answer.replace(" ", "")


@in_both_modes
def test_each_stage_says_once_that_a_request_is_done(ran: Ran, mode: Mode):
    """The same holds for vLLM-Omni alone, else the comparison would mean nothing."""
    assert {tuple(answer["ends"].values()) for answer in stock(ran, "undisturbed")["answers"].values()} == {(1, 1)}
    scenarios = scheduled(ran, mode)["scenarios"]
    for name in AS_STOCK:
        answers = scenarios[name]["answers"]
        ends = {request: set(answer["ends"].values()) for request, answer in answers.items()}
        assert ends == {request: {1} for request in answers}, name


@in_both_modes
def test_metrics_tell_what_happened(ran: Ran, mode: Mode):
    samples = scheduled(ran, mode)["scenarios"]["told"]["metrics"]

    def total(metric: str, **labels: str) -> float:
        return sum(value for name, of, value in samples if name == metric and labels.items() <= of.items())

    for stage in "012":
        assert total("requests_total", stage=stage, outcome="finished") >= 2 * 2 * len(CROWD)
        assert total("latency_seconds_count", stage=stage) == total("requests_total", stage=stage, outcome="finished")
        assert total("waiting", stage=stage) == total("running", stage=stage) == 0
        assert total("host_memory_bytes", stage=stage) > 0
    followers = {"merged": 5 + 2, "handed_over": 2, "parting": 3 if mode == "full_payload" else 1 + 1}
    assert total("merged_requests_total", stage="0") == sum(followers.values())
    for stage in "01":
        assert total("restarts_total", stage=stage) == 1
        assert total("redispatched_requests_total", stage=stage) >= 1
    assert total("restarts_total", stage="2") == 0


@in_both_modes
def test_nothing_is_left(ran: Ran, mode: Mode):
    results = scheduled(ran, mode)
    assert results["children_left"] == []
    # vLLM-Omni itself leaves what a request that was aborted has said so far (`test_pipelines.py`)
    known = "-one_leaves-leaving-" if mode == "full_payload" else "no request"
    assert [name for name in results["shm_left"] if known not in name] == []
