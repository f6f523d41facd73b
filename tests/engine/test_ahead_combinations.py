"""Encode-ahead beside other features of vLLM: the same tokens as stock with that feature, and items from the lane."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.engine.combinations.cases import CASES, Case
from tests.engine.combinations.sides import run_cases
from tests.engine.harness.compare import first_difference

OFTEN = [case for case in CASES if not case.long]
LONG = [case for case in CASES if case.long]
BY_NAME = {case.name: case for case in CASES}


@pytest.fixture(scope="module")
def often(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    return run_cases(tmp_path_factory.mktemp("often"), OFTEN)


def rounds_of(results: dict[str, Any], case: Case) -> list[dict[str, Any]]:
    if case.name not in results or results[case.name]["error"] is not None:
        pytest.fail(results.get("process") or results[case.name]["error"])
    rounds: list[dict[str, Any]] = results[case.name]["rounds"]
    return rounds


def check(stock: dict[str, Any], ours: dict[str, Any], case: Case) -> None:
    """Compare the answers of each round; in the first one encodings come from the lane, or none do if so said."""
    expected, got = rounds_of(stock, case), rounds_of(ours, case)
    assert len(expected) == len(got) == case.rounds
    for one, other in zip(expected, got, strict=True):
        assert first_difference(one["answers"], other["answers"]) is None
        assert other["left"] == []
    assert (got[0]["lane"] > 0, got[0]["in_step"] > 0 or not case.in_step) == (not case.in_step, True)
    assert bool(got[0]["drafted"]) == ("speculative_config" in case.args)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.newest
@pytest.mark.parametrize("case", OFTEN, ids=lambda case: case.name)
def test_same_tokens_and_items_from_the_lane(often: tuple[dict[str, Any], dict[str, Any]], case: Case) -> None:
    check(*often, case)


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.parametrize("case", LONG, ids=lambda case: case.name)
def test_same_tokens_and_items_from_the_lane_long(tmp_path: Path, case: Case) -> None:
    """Each in processes of its own: some libraries, once imported, keep vLLM 0.33 from starting a second engine."""
    if case.needs is not None and find_spec(case.needs) is None:
        pytest.skip(f"{case.needs} is not installed")
    check(*run_cases(tmp_path, [case]), case)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.newest
def test_another_connector_gets_what_the_lane_made_and_is_asked_first(
    often: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    """It stores the encodings of the first round, and all of the second round come from it."""
    stock, ours = often
    first, second = rounds_of(ours, BY_NAME["another-connector"])
    contents = {number for ask in BY_NAME["another-connector"].asks for number in ask.images}
    assert ours["another-connector"]["files"] == stock["another-connector"]["files"] == len(contents)
    assert first["lane"] + first["in_step"] >= len(contents)
    assert (second["lane"], second["in_step"]) == (0, 0)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.newest
def test_the_adapter_and_the_embeddings_of_a_client_change_the_answers(
    often: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    """Of the harness: were the answers the same without them, comparing these would prove nothing."""
    _, ours = often
    (plain,), (lora,), (given,) = (rounds_of(ours, BY_NAME[name]) for name in ("eagle", "lora", "client-embeddings"))
    tokens = {id_: answer["tokens"] for id_, answer in plain["answers"].items()}
    assert [id_ for id_ in tokens if lora["answers"][id_]["tokens"] == tokens[id_]] == []
    assert given["answers"]["one"]["tokens"] == tokens["one"] != given["answers"]["given"]["tokens"]
