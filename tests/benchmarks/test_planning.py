"""`benchmarks.planning`: what planning simulates is bounded, and the same each time."""

import json

import pytest

from benchmarks.planning.__main__ import main
from benchmarks.planning.trace import write
from vllm_omni_sched.sim.plan.systems import known_devices
from vllm_omni_sched.sim.workloads.importers import TraceFormat, import_trace

MOST_TRIALS_OF_A_LAYOUT = 100
"""A layout is tuned with 24 values of two seeds at a few sizes, for stock, for prefill replicas, and for ours."""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    out = tmp_path_factory.mktemp("planning")
    records = []
    for _ in range(2):
        main(["--seconds", "120", "--rate", "2", "--max-gpus", "8", "--out", str(out)])
        records.append(json.loads((out / "planning-synthetic.json").read_text())["results"][0])
    return records


def test_candidates_and_requests_that_are_simulated_are_bounded(found):
    one = found[0]
    trials = sum(one["trials"].values())
    assert 0 < trials <= MOST_TRIALS_OF_A_LAYOUT * one["layouts"]
    assert one["layouts"] <= 4 * len(known_devices())
    # a trial has the training half of the trace at most
    assert one["simulated_requests"] <= trials * one["requests"] * 0.6


def test_the_same_trace_gives_the_same_counts_and_plan(found):
    first, second = ({key: one[key] for key in one if key != "cpu_seconds"} for one in found)
    assert first == second
    assert first["plan"]["attainment"] >= first["slo"]["attainment"]


def test_the_made_up_trace_has_the_published_statistics(tmp_path):
    file = tmp_path / "trace.jsonl"
    write(file, 600.0, 4.0, 0)
    requests = import_trace(file, TraceFormat.MOONCAKE).trace.requests
    assert len(requests) == pytest.approx(2400, rel=0.25)
    assert sum(one.text_tokens for one in requests) / len(requests) == pytest.approx(12_035, rel=0.2)
    assert sum(one.output_tokens for one in requests) / len(requests) == pytest.approx(343, rel=0.2)
    blocks = [block for one in requests for block in one.blocks]
    assert 1 - len(set(blocks)) / len(blocks) == pytest.approx(0.4, abs=0.1)
