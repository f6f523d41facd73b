"""At temperature 0 our engines answer with stock's tokens, after stock's decisions, whatever is asked of them."""

from __future__ import annotations

import pytest

from tests.engine.conftest import Results
from tests.engine.harness.compare import first_difference, first_different_step
from tests.engine.harness.engines import SEEDED, STOPS, VARIANTS, cases, stock_engines
from tests.engine.harness.scenarios import ITEMS_OF_LONG_SESSION, SCENARIOS
from tests.engine.harness.workload import Session

OTHER_DECISIONS = ("encode-ahead", "encode-rounds", "steered")
SCENARIOS_OF_STOCK = {spec.name: spec.scenarios for spec in stock_engines("llava", "voxtral")}
CASES = cases(
    (variant, scenario)
    for variant in VARIANTS
    if not variant.stock.startswith(("tight", "scarce"))  # test_preemption.py
    and not variant.name.startswith("bad-input")  # test_bad_input.py
    for scenario in variant.scenarios or SCENARIOS_OF_STOCK[variant.stock]
    if scenario in SCENARIOS_OF_STOCK[variant.stock]
)


@pytest.mark.parametrize(("variant", "scenario"), CASES)
def test_same_tokens(in_process: Results, variant, scenario):
    expected = in_process.of_stock(variant.stock, scenario)["requests"]
    assert first_difference(expected, in_process.of_ours(variant.name, scenario)["requests"]) is None


@pytest.mark.parametrize(("variant", "scenario"), [case for case in CASES if not case.id.startswith(OTHER_DECISIONS)])
def test_same_decisions(in_process: Results, variant, scenario):
    """Which requests ran in each step, with how many tokens, and which items were encoded in it."""
    expected = in_process.of_stock(variant.stock, scenario)["steps"]
    assert first_different_step(expected, in_process.of_ours(variant.name, scenario)["steps"]) is None


@pytest.mark.parametrize(("variant", "scenario"), CASES)
def test_every_request_leaves_exactly_once(in_process: Results, variant, scenario):
    ran = in_process.of_ours(variant.name, scenario)
    assert ran["left"] == {request.id: 1 for request in SCENARIOS[scenario]().requests}
    assert ran["still_there"] == []


def test_a_seed_gives_the_same_tokens_however_often_the_prompt_is_cut(in_process: Results):
    """Compare seeded prompts in several steps with prompts in one; stock ends if it cuts them (`test_runner_v1.py`)."""
    expected = in_process.of_stock("sync", SEEDED)["requests"]
    assert [expected[f"seed-{i}"]["tokens"] == expected["seed-0"]["tokens"] for i in (1, 2)] == [False, True]
    ran = in_process.of_ours("chunked", SEEDED)
    assert first_difference(expected, ran["requests"]) is None
    assert sum("seed-0" in step for step in ran["steps"]) > 1 + len(expected["seed-0"]["tokens"])
    assert ran["still_there"] == []


@pytest.mark.parametrize("engine", ["sync", "async"])
def test_answers_of_sessions_that_end_by_stop_tokens(in_process: Results, engine):
    expected = in_process.of_stock("sync", STOPS)["requests"]
    ends = [end for id_ in ("stops-at-once", "stops-later", "stops-backlog") for end in expected[id_]["ends"]]
    assert ends.count("stop") > 5
    ran = in_process.of_ours(engine, STOPS)
    assert first_difference(expected, ran["requests"]) is None
    assert ran["still_there"] == []


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param("encode-ahead-host", marks=pytest.mark.long),
    ],
)
def test_what_left_the_encoder_cache_came_back_from_host_memory(in_process: Results, variant):
    """Ask 25 pictures, of which 12 fit: only those of simultaneous requests are encoded twice."""
    before = in_process.of_stock("chunked", "returning_images")["steps"]
    encoded_by_stock = sum(step.count(",") + step.count("[") for step in before if " | encode " in step)
    tiers = in_process.of_ours(variant, "returning_images")["tiers"]
    assert tiers["host"] > 25
    assert tiers["lane"] + tiers["miss"] < encoded_by_stock


@pytest.mark.parametrize("scenario", SCENARIOS_OF_STOCK["async"])
def test_async_stock_says_what_sync_stock_says(in_process: Results, scenario):
    """Check the harness: forced on the CPU, async scheduling computes what synchronous scheduling computes."""
    expected = in_process.of_stock("sync", scenario)["requests"]
    assert first_difference(expected, in_process.of_stock("async", scenario)["requests"]) is None


def test_pictures_decide_the_tokens(in_process: Results):
    """Check the harness: were answers the same whatever the picture, comparing them would prove nothing."""
    these = in_process.of_stock("sync", "images")["requests"]
    others = in_process.of_stock("sync", "other_images")["requests"]
    assert [id_ for id_ in others if these[id_]["tokens"] == others[id_]["tokens"]] == []


def test_sounds_decide_the_tokens(in_process: Results):
    heard = in_process.of_stock("speech", "speech")["requests"]
    count = len(heard["leaves"]["tokens"])
    assert len({tuple(heard[id_]["tokens"][:count]) for id_ in heard}) == len(heard) == 3


@pytest.mark.parametrize("engine", ["sync", "async"])
def test_who_leaves_does_not_change_what_others_get(in_process: Results, engine):
    """Three equal requests beside clients that leave get equal answers, and who left had got the beginning."""
    heard = in_process.of_ours(engine, "aborts")["requests"]
    stays = heard["stays-0"]["tokens"]
    assert heard["stays-2"]["tokens"] == heard["stays-6"]["tokens"] == stays
    assert [heard[f"leaves-{count}"]["tokens"] for count in (0, 1, 7)] == [[], stays[:1], stays[:7]]
    assert len(heard["session-leaves"]["tokens"]) == 10


@pytest.mark.parametrize(
    ("engine", "scheduler", "batch_queue"),
    [
        ("no-flag", "vllm.v1.core.sched.scheduler.Scheduler", False),
        ("sync", "vllm_omni_sched.engine.scheduler.OmniSyncScheduler", False),
        pytest.param(
            "sync-by-name", "vllm_omni_sched.engine.scheduler.OmniSyncScheduler", False, marks=pytest.mark.long
        ),
        ("async", "vllm_omni_sched.engine.scheduler.OmniScheduler", True),
        ("cache-manager-alone", "vllm.v1.core.sched.scheduler.Scheduler", False),
    ],
)
def test_the_scheduler_that_async_scheduling_wants(in_process: Results, engine, scheduler, batch_queue):
    facts = in_process.ours[engine]["facts"]
    assert (facts["scheduler"], facts["batch_queue"]) == (scheduler, batch_queue)


def test_our_cache_manager_serves_alone(in_process: Results):
    facts = in_process.ours["cache-manager-alone"]["facts"]
    assert facts["encoder_cache_manager"] == "vllm_omni_sched.engine.encoder.cache.OmniEncoderCacheManager"
    assert not any(name.startswith("vllm_omni_sched") for name in facts["runner"])


@pytest.mark.parametrize("engine", ["sync", "async"])
def test_a_long_session_is_sent_in_deltas_that_do_not_grow(in_process: Results, engine):
    [long] = [request for request in SCENARIOS["long_session"]().requests if isinstance(request, Session)]
    assert long.num_items == ITEMS_OF_LONG_SESSION == 2000
    ran = in_process.of_ours(engine, "long_session")
    assert ran["messages"] == {"SessionStart": 1, "SessionDelta": len(long.chunks) - 1, "NewRequestData": 3}
    second, *_, last = ran["update_bytes"]["long"][1:]
    assert last < second + 1024
    assert in_process.of_stock(engine, "long_session")["update_bytes"]["long"][-1] > 4 * last


def test_delta_off_sends_none(in_process: Results):
    assert in_process.of_ours("delta-off", "sessions")["messages"].keys() == {"NewRequestData"}
    assert in_process.of_ours("async", "sessions")["messages"].keys() == {
        "NewRequestData",
        "SessionStart",
        "SessionDelta",
    }
