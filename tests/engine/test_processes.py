"""The same with worker processes, the default on a CPU: what the scheduler sends is pickled and read elsewhere."""

from __future__ import annotations

import pytest

from tests.engine.conftest import Results
from tests.engine.harness.compare import first_difference
from tests.engine.harness.engines import served_engine

pytestmark = pytest.mark.newest
SCENARIOS = served_engine("llava").scenarios


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_same_tokens(in_processes: Results, scenario):
    expected = in_processes.of_stock("served", scenario)["requests"]
    assert first_difference(expected, in_processes.of_ours("served", scenario)["requests"]) is None


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_front_end_and_worker_let_go_of_every_request(in_processes: Results, scenario):
    assert in_processes.of_ours("served", scenario)["still_there"] == []


def test_our_runner_was_at_work(in_processes: Results):
    ours = in_processes.ours["served"]["facts"]["runner"]
    stock = in_processes.stock["served"]["facts"]["runner"]
    assert [name for name in ours if name not in stock and name.startswith("vllm_omni_sched")] != []
    assert [name for name in stock if name.startswith("vllm_omni_sched")] == []
