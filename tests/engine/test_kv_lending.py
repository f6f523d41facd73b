"""A real engine on CPU lends KV blocks to its lane: the tokens are stock's, nobody is preempted, everything returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness.lending import BYTES_PER_EMBED, EMBEDS, FAULTS, PREFIXES, RESERVE, ROUNDS, TEXTS
from tests.engine.harness.processes import IN_PROCESS, OUR_PLUGIN, ROOT, run_program, write_model

pytestmark = pytest.mark.newest

FAILS, DEATHS = ("raises", "no memory"), ("dies", "dies without a successor")


@pytest.fixture(scope="module")
def model() -> Path:
    """Return the folder of a LLaVA of which a picture takes 64 tokens."""
    return write_model("llava", ROOT / ".models" / "llava-64-tokens", image_size=112)


@pytest.fixture(scope="module")
def rounds_of_stock(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    log = tmp_path_factory.mktemp("lending_stock") / "log"
    found: dict[str, Any] = run_program("tests.engine.harness.lending", model, "stock", environment=IN_PROCESS, log=log)
    return found


@pytest.fixture(scope="module")
def stock(rounds_of_stock: dict[str, Any]) -> dict[str, Any]:
    calm: dict[str, Any] = rounds_of_stock["none"]
    return calm


@pytest.fixture(scope="module")
def rounds(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    log = tmp_path_factory.mktemp("lending") / "log"
    found: dict[str, Any] = run_program(
        "tests.engine.harness.lending", model, environment=OUR_PLUGIN | IN_PROCESS, log=log
    )
    return found


def test_pictures_are_encoded_in_lent_memory_and_the_tokens_are_those_of_stock(rounds, stock):
    ours = rounds["none"]
    assert ours["tokens"] == stock["tokens"]
    assert ours["loans_lent"] > 0
    borrowed = (EMBEDS - RESERVE) * BYTES_PER_EMBED
    assert ours["given_back_bytes"] >= borrowed
    assert ours["given_back_bytes"] / ours["taken"] >= borrowed / ours["most"]


def test_the_memory_of_lent_blocks_is_given_back(rounds):
    seen = [pages for found in rounds.values() for pages in found["resident"]]
    assert seen
    assert set(seen) == {0}


def test_what_an_encode_takes_is_measured(rounds):
    assert 0 < rounds["dies"]["bytes_per_embed"] < 2 * BYTES_PER_EMBED


def test_nobody_is_preempted_but_by_a_reset(rounds, stock):
    assert stock["preempted"] == []
    preempted = {name: found["preempted"] for name, found in rounds.items()}
    assert sorted(preempted.pop("reset")) == sorted(rounds["reset"]["running"]) != []
    assert preempted == {name: [] for name in preempted}


def test_every_block_comes_back_whatever_happens(rounds):
    assert set(rounds) == {*ROUNDS} == {*FAULTS, *PREFIXES, "aborted", "reset", "paused"}
    assert {name: found["not_back"] for name, found in rounds.items()} == dict.fromkeys(rounds, 0)
    assert {name: found["left"] for name, found in rounds.items()} == {name: [] for name in rounds}


@pytest.mark.parametrize("fault", FAILS)
def test_a_failing_encode_fails_its_request_alone(rounds, stock, fault):
    found = rounds[fault]
    assert {id_ for id_, reason in found["reasons"].items() if reason != "length"} == {"plain"}
    assert {**found["tokens"], "plain": None} == {**stock["tokens"], "plain": None}


@pytest.mark.parametrize("death", DEATHS)
def test_the_death_of_the_lane_changes_no_token(rounds, stock, death):
    assert rounds[death]["tokens"] == stock["tokens"]


@pytest.mark.parametrize("name", PREFIXES)
def test_prefixes_are_found_in_the_cache_as_without_lending(rounds, rounds_of_stock, name):
    ours, expected = rounds[name], rounds_of_stock[name]
    assert ours["tokens"] == expected["tokens"]
    assert ours["loans_lent"] > 0
    assert ours["hits"] == expected["hits"] > 0


def test_a_reset_of_the_prefix_cache_while_blocks_are_lent_succeeds_and_changes_no_token(rounds, stock):
    """Without lending no block is in use once all requests are preempted, and vLLM raises an error if one is."""
    assert rounds["reset"]["paused"] > 0
    assert rounds["reset"]["tokens"] == stock["tokens"]


def test_a_pause_while_blocks_are_lent_changes_no_token(rounds, stock):
    """So does sleep of level 0, which is a pause; deeper sleep there is none on a CPU."""
    assert rounds["paused"]["paused"] > 0
    assert rounds["paused"]["tokens"] == stock["tokens"]


@pytest.mark.parametrize("engine", ["speculation", pytest.param("async scheduling", marks=pytest.mark.long)])
def test_other_engines_give_the_tokens_of_stock_and_preempt_nobody(
    engine: str, model: Path, stock: dict[str, Any], tmp_path: Path
) -> None:
    environment = OUR_PLUGIN | IN_PROCESS
    found = run_program(
        "tests.engine.harness.lending", model, "ours", engine, environment=environment, log=tmp_path / "log"
    )["none"]
    assert found["tokens"] == stock["tokens"]
    assert (found["drafted"] > 0) == (engine == "speculation")
    assert found["loans_lent"] > 0
    assert (found["preempted"], found["not_back"], found["left"]) == ([], 0, [])


def test_requests_that_are_aborted_while_they_borrow_change_no_others(rounds, stock):
    found = rounds["aborted"]
    texts = [f"text-{one}" for one in range(TEXTS)]
    assert "abort" in found["reasons"].values()
    assert {id_: found["tokens"][id_] for id_ in texts} == {id_: stock["tokens"][id_] for id_ in texts}
