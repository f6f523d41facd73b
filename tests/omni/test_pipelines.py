"""The same requests give the same answers over every connector, in a vLLM-Omni that runs."""

from __future__ import annotations

from collections import Counter
from math import ceil
from typing import Any

import pytest

from dev.omni_cpu.asking import Ask
from dev.omni_cpu.compare import first_difference
from dev.omni_cpu.spec import MODES, TEXT_TO_SOUND, TEXT_TO_TEXT, Mode
from tests.omni.conftest import Ran
from tests.omni.connectors import CONNECTORS, REFERENCE, Connector
from tests.omni.harness.scenarios import ASKS, SCENARIOS

pytestmark = pytest.mark.slow

EVERY = [REFERENCE, *CONNECTORS]
LOGGING = next(connector for connector in CONNECTORS if connector.name == "LoggingConnector")
CHANGING = Connector("ChangingConnector")
CHUNK_FRAMES = 4  # of dev/omni_cpu/processors.py
FRAME_SAMPLES = 4  # of dev/omni_cpu/models.py

OFTEN = {("full_payload", "OmniAutoConnector"), ("async_chunk", "ArenaConnector")}
"""Pipelines of three stages that `make test` starts besides those of the reference."""

in_both_modes = pytest.mark.parametrize("mode", MODES)


def over(*connectors: Connector) -> pytest.MarkDecorator:
    """In both modes over each connector; all but `OFTEN` and the reference are for `make test-long`."""
    cases = [
        pytest.param(
            mode,
            connector,
            id=f"{mode}-{connector.name}",
            marks=() if connector is REFERENCE or (mode, connector.name) in OFTEN else pytest.mark.long,
        )
        for mode in MODES
        for connector in connectors
    ]
    return pytest.mark.parametrize(("mode", "connector"), cases)


@pytest.mark.parametrize("scenario", SCENARIOS)
@over(*CONNECTORS)
def test_same_answers(ran: Ran, mode: Mode, connector: Connector, scenario: str):
    expected = ran.answers(TEXT_TO_SOUND, mode, REFERENCE, scenario)
    assert first_difference(expected, ran.answers(TEXT_TO_SOUND, mode, connector, scenario)) is None


@over(*EVERY)
def test_nothing_is_left(ran: Ran, mode: Mode, connector: Connector):
    results = ran(TEXT_TO_SOUND, mode, connector).results
    assert results["children_left"] == []
    # In full-payload mode vLLM-Omni sends on what a request that was aborted has said so far. No stage asks for it, and
    # `cleanup` is not called.
    known = "-leaving-" if mode == "full_payload" else "no request"
    assert [name for name in results["shm_left"] if known not in name] == []


@in_both_modes
def test_alone_as_in_company(ran: Ran, mode: Mode):
    alone = ran.answers(TEXT_TO_SOUND, mode, REFERENCE, "one_by_one")
    assert first_difference(alone, ran.answers(TEXT_TO_SOUND, mode, REFERENCE, "together")) is None
    beside_one_that_left = ran.answers(TEXT_TO_SOUND, mode, REFERENCE, "one_leaves")
    assert first_difference(alone | {"afterwards": alone["short"]}, beside_one_that_left) is None


def test_chunks_say_what_whole_payloads_say(ran: Ran):
    """What the talker says depends on each row that crosses the edge, and not on how many cross at a time."""
    chunks, whole = (ran.answers(TEXT_TO_SOUND, mode, REFERENCE, "one_by_one") for mode in MODES)
    assert first_difference(whole, chunks) is None


@in_both_modes
def test_two_stages_say_what_three_say(ran: Ran, mode: Mode):
    two = ran.answers(TEXT_TO_TEXT, mode, LOGGING, "together")
    three = ran.answers(TEXT_TO_SOUND, mode, REFERENCE, "together")
    for name, ask in ASKS.items():
        assert two[name]["text"]["0"] == three[name]["text"]["0"]
        assert two[name]["text"]["1"] == _codes(three[name])
        assert (len(two[name]["text"]["0"]), len(_codes(three[name]))) == (ask.thinks, ask.says)


def test_the_blocking_entry_point_workers_in_processes_of_their_own_and_two_replicas(ran: Ran):
    """All three are tested at once, because a pipeline takes long to start."""
    auto = next(connector for connector in CONNECTORS if connector.name == "OmniAutoConnector")
    results = ran(TEXT_TO_TEXT, "full_payload", auto, entrypoint="Omni", workers=True, replicas=2).results
    expected = ran.answers(TEXT_TO_TEXT, "full_payload", LOGGING, "one_by_one")
    twice = {f"{name} {number}": answer for name, answer in expected.items() for number in range(2)}
    assert first_difference(twice, results["scenarios"]["blocking"]) is None
    assert sum("Worker" in name for name in results["processes"]) == 3
    assert (results["children_left"], results["shm_left"]) == ([], [])


def test_it_is_noticed_when_payloads_change(ran: Ran):
    expected = ran.answers(TEXT_TO_TEXT, "async_chunk", LOGGING, "together")
    changed = ran.answers(TEXT_TO_TEXT, "async_chunk", CHANGING, "together")
    assert first_difference(expected, changed) is not None


def test_answers_differ(ran: Ran):
    """Answers must differ, else comparing them would prove nothing."""
    answers = ran.answers(TEXT_TO_SOUND, "async_chunk", REFERENCE, "one_by_one")
    said = [_codes(answers[name])[:6] for name in ASKS]
    assert all(len(set(codes)) > 2 for codes in said)
    assert len({tuple(codes) for codes in said}) == len(ASKS)


@pytest.mark.parametrize("pipeline", [TEXT_TO_TEXT, pytest.param(TEXT_TO_SOUND, marks=pytest.mark.long)])
@in_both_modes
def test_the_connector_in_the_yaml_carries_the_payloads(ran: Ran, pipeline: str, mode: Mode):
    outcome = ran(pipeline, mode, LOGGING)
    puts, gets = (_by_edge_and_request(outcome.log, did) for did in ("put", "get"))
    for edge in outcome.spec.edges:
        for scenario in ("one_by_one", "together"):
            for number, ask in enumerate(ASKS.values()):
                request = f"{scenario}-{number}"
                expected = _payloads(mode, edge, ask)
                assert (edge, request, puts[edge, request]) == (edge, request, expected)
                assert (edge, request, gets[edge, request]) == (edge, request, expected)


def _payloads(mode: Mode, edge: tuple[str, str], ask: Ask) -> int:
    if mode == "full_payload":
        return 1
    return ask.thinks if edge == ("0", "1") else ceil(ask.says / CHUNK_FRAMES)


def _codes(answer: dict[str, Any]) -> list[int]:
    return [int(code) for code in answer["sound"][::FRAME_SAMPLES]]


def _by_edge_and_request(log: list[dict[str, Any]], did: str) -> Counter[tuple[tuple[str, str], str]]:
    """Requests are named `{prefix}-{scenario}-{number}-{what vLLM-Omni adds}`."""
    lines = [line for line in log if line["did"] == did]
    return Counter((tuple(line["edge"]), "-".join(line["key"].split("-")[1:3])) for line in lines)
