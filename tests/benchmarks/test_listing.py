"""`python -m benchmarks`, and the result files that are committed."""

import json

import pytest

from benchmarks.harness.provenance import ROOT

RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_committed_result_says_where_it_comes_from(path):
    record = json.loads(path.read_text())
    told = record["provenance"]
    assert record["results"]
    assert told["command"].startswith(f"python -m benchmarks.{record['benchmark']}")
    for name in ("date", "revision", "seed", "cpu", "cores", "load_average", "python", "versions"):
        assert told[name] is not None
    assert not [word for word in told["command"].replace("=", " ").split() if word.startswith("/")]
