"""Files are there whole or not at all; reports say where they are from."""

from __future__ import annotations

import json
import math
import stat
from pathlib import Path

import pytest

from tests.support import sim_results
from tests.support.scenarios import GOOD
from vllm_omni_sched.sim.output import replacing
from vllm_omni_sched.sim.study import report
from vllm_omni_sched.sim.study.evaluate import Finding
from vllm_omni_sched.sim.study.plan import Study, load_study
from vllm_omni_sched.sim.study.running import run_study


def found(folder: Path, more: str = "", before: str = "") -> tuple[Study, list[Finding]]:
    path = folder / "one.toml"
    path.write_text(before + GOOD + more)
    study = load_study(path)
    return study, list(run_study(study, sim_results.run))


def test_a_file_takes_the_place_of_the_old_one_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "one.json"
    with replacing(path) as file:
        file.write("new")
        assert not path.exists()
    assert path.read_text() == "new"
    assert [one.name for one in path.parent.iterdir()] == ["one.json"]
    assert stat.S_IMODE(path.stat().st_mode) & 0o600 == 0o600


def test_what_is_interrupted_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_text("old")

    def interrupted() -> None:
        with replacing(path) as file:
            file.write("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert {one.name: one.read_text() for one in tmp_path.iterdir()} == {"one.json": "old"}


def test_a_report_is_json_without_nan_and_without_paths(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text("{}")
    path = tmp_path / "one.toml"
    path.write_text(GOOD.replace('model = "qwen2.5-vl-7b"', 'calibration = "mine.json"'))
    study = load_study(path)
    (finding,) = run_study(study, sim_results.run)
    finding.summary["odd"] = [math.inf, math.nan, {"deep": (math.inf, 1)}]
    body = report.report(study, [finding], ["vllm-omni-sched", "simulate", str(path), f"--out={tmp_path}"])
    report.write(tmp_path / "found.json", body)
    text = (tmp_path / "found.json").read_text()
    read = json.loads(text)
    assert str(tmp_path) not in text
    assert read["results"][0]["summary"]["odd"] == [None, None, {"deep": [None, 1]}]
    assert read["provenance"]["command"] == f"vllm-omni-sched simulate one.toml --out={tmp_path.name}"
    assert read["scenario"]["stages"][1]["calibration"] == "mine.json"
    assert "max_num_seqs" not in read["scenario"]["stages"][1]  # what was said, not what is so by default


def test_a_report_of_several_seeds_has_their_spread(tmp_path: Path) -> None:
    study, findings = found(tmp_path, before="repeats = 2\n")
    body = report.report(study, findings, ["x"])
    assert [row["seeds"] for row in body["spread"]] == [[3, 4]]
    assert "spread" not in report.report(*found(tmp_path), ["x"])
