"""The same with worker processes, the default on a CPU: what the scheduler sends is pickled and read elsewhere."""

from __future__ import annotations

import pytest

from tests.engine.conftest import Results
from tests.engine.harness.compare import first_difference
from tests.engine.harness.engines import STOPS, TOO_LONG, served_engine
from tests.engine.test_bad_input import assert_only_one_ended

pytestmark = pytest.mark.newest
SCENARIOS = served_engine("llava").scenarios


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_same_tokens(in_processes: Results, scenario):
    expected = in_processes.of_stock("served", scenario)["requests"]
    assert first_difference(expected, in_processes.of_ours("served", scenario)["requests"]) is None


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_front_end_and_worker_let_go_of_every_request(in_processes: Results, scenario):
    assert in_processes.of_ours("served", scenario)["still_there"] == []


@pytest.mark.parametrize("engine", ["served", "served-realtime"])
def test_a_session_that_grows_too_long_ends_alone(in_processes: Results, engine):
    assert_only_one_ended(in_processes.of_ours(engine, TOO_LONG)["requests"])
    assert in_processes.of_ours(engine, TOO_LONG)["still_there"] == []


@pytest.mark.parametrize("engine", ["served", "served-realtime"])
def test_answers_that_end_by_stop_tokens(in_process: Results, in_processes: Results, engine):
    expected = in_process.of_stock("sync", STOPS)["requests"]
    assert first_difference(expected, in_processes.of_ours(engine, STOPS)["requests"]) is None


def test_our_runner_was_at_work(in_processes: Results):
    ours = in_processes.ours["served"]["facts"]["runner"]
    stock = in_processes.stock["served"]["facts"]["runner"]
    assert [name for name in ours if name not in stock and name.startswith("vllm_omni_sched")] != []
    assert [name for name in stock if name.startswith("vllm_omni_sched")] == []
