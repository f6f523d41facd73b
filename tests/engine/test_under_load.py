"""With the options that users name, none or a profile, an engine under load runs as many requests at once as stock.

Tokens and ends of the same requests, and the decisions of the options that change none: `test_same_tokens.py`.
"""

from __future__ import annotations

import pytest

from tests.engine.conftest import Results
from tests.engine.harness.engines import VARIANTS, cases
from tests.engine.harness.scenarios import RUN_AT_ONCE, SCENARIOS
from vllm_omni_sched.config.profiles import Profile

LOADED = [variant for variant in VARIANTS if variant.stock == "load"]
CASES = cases((variant,) for variant in LOADED)
TEXTS = {request.id for request in SCENARIOS["rush"]().requests if request.id.startswith("text")}


def widths(steps: list[str]) -> list[int]:
    """Return how many requests each step had."""
    return [len(step.partition(" | ")[0].split()) for step in steps]


def names(steps: list[str]) -> list[set[str]]:
    """Return the requests of each step."""
    return [{one.partition(":")[0] for one in step.partition(" | ")[0].split()} for step in steps]


def with_room(steps: list[str]) -> int:
    """Count the steps with fewer requests than may run, although a request without pictures has not begun."""
    waiting, found = set(TEXTS), 0
    for running in names(steps):
        waiting -= running
        found += bool(waiting) and len(running) < RUN_AT_ONCE
    return found


def test_each_profile_is_loaded():
    named = {(variant.omni_sched or {}).get("profile", Profile.EXACT.value) for variant in LOADED}
    assert named == {profile.value for profile in Profile}


def test_stock_is_full(in_process: Results):
    steps = in_process.of_stock("load", "rush")["steps"]
    assert len(SCENARIOS["rush"]().requests) == 3 * max(widths(steps))
    assert with_room(steps) == 0


@pytest.mark.parametrize("variant", CASES)
def test_it_is_not_throttled(in_process: Results, variant):
    """Steps are full while a request waits that needs no encode, but for the few of a picture that is just missing.

    How long encodes take beside the steps, the machine decides: the steps of requests with pictures are not counted.
    """
    stock, ours = in_process.of_stock("load", "rush"), in_process.of_ours(variant.name, "rush")
    assert max(widths(ours["steps"])) == max(widths(stock["steps"])) == RUN_AT_ONCE
    assert with_room(ours["steps"]) <= len(stock["steps"]) // 10
    assert ours["idle"] == 0
    until = max(number for number, running in enumerate(names(ours["steps"])) if running & TEXTS)
    assert until <= 1.1 * len(stock["steps"]) + 3
