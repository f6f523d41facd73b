"""`python -m benchmarks`, and the result files that are committed."""

import json

import pytest

from benchmarks.__main__ import entries
from benchmarks.harness.provenance import ROOT

RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


def test_every_benchmark_is_listed_and_explained():
    names = [
        "anomaly",
        "backtest",
        "compression",
        "connectors",
        "failover",
        "forecast",
        "gpu",
        "gpu.copies",
        "gpu.frames",
        "gpu.ipc",
        "gpu.lanes",
        "gpu.nvdec",
        "handover",
        "hosts",
        "mixed",
        "overhead",
        "policy_cost",
        "preprocess",
        "realtime",
        "serve",
        "sim_fidelity",
        "stages",
        "step_cost",
        "streaming",
        "tiers",
        "video",
        "video_server",
    ]
    assert [name for name, _ in entries()] == names
    readme = (ROOT / "benchmarks" / "README.md").read_text()
    for name, question in entries():
        assert question
        assert f"python -m benchmarks.{name}" in readme


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_committed_result_says_where_it_comes_from(path):
    record = json.loads(path.read_text())
    told = record["provenance"]
    assert record["results"]
    assert told["command"].startswith(f"python -m benchmarks.{record['benchmark']}")
    for name in ("date", "revision", "seed", "cpu", "cores", "load_average", "python", "versions"):
        assert told[name] is not None
    assert not [word for word in told["command"].replace("=", " ").split() if word.startswith("/")]
