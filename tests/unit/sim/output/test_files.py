"""Files are there whole or not at all; reports say where they are from; pictures say that they are simulated."""

from __future__ import annotations

import io
import itertools
import json
import math
import stat
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.support import sim_results
from tests.support.scenarios import GOOD, KNOWN
from vllm_omni_sched.sim.output import plots, report, style
from vllm_omni_sched.sim.output.files import provenance, replacing
from vllm_omni_sched.sim.study.evaluate import Finding
from vllm_omni_sched.sim.study.plan import Study, load_study
from vllm_omni_sched.sim.study.running import run_study


def found(folder: Path, more: str = "", before: str = "") -> tuple[Study, list[Finding]]:
    path = folder / "one.toml"
    path.write_text(before + GOOD + more)
    study = load_study(path, known=KNOWN)
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
    study = load_study(path, known=KNOWN)
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


def test_provenance_says_all_that_is_needed() -> None:
    record = provenance(["vllm-omni-sched", "simulate"], 7, {"llm": "roofline: H100"}, "text")
    assert set(record) == {
        "date", "command", "revision", "version", "python", "numpy", "seed", "costs", "workload"
    }  # fmt: skip
    assert (record["seed"], record["costs"], record["workload"]) == (7, {"llm": "roofline: H100"}, "text")


VARIANTS = '[[variants]]\nname = "stock"\nset = { policy = {} }\n[[variants]]\nname = "ours"\n'


@pytest.mark.parametrize(
    ("more", "pictures"),
    [
        ("", ["itl", "timeline", "ttft"]),
        (VARIANTS, ["itl", "over-time", "ttft"]),
        (VARIANTS + "[sweep]\nworkload.rate = [1, 2, 5]\n", ["itl", "over-time", "sweep", "ttft"]),
        (VARIANTS + '[search]\nkind = "tightest_slo"\n', ["itl", "search", "ttft"]),
        ('[sweep]\nworkload.rate = [1, 2]\n[search]\nkind = "throughput"\n', ["itl", "search", "ttft"]),
        ('[sweep]\nworkload.rate = [1, 2, 5]\n[search]\nkind = "throughput"\n', ["itl", "sweep", "ttft"]),
        (VARIANTS + '[[cases]]\nname = "few"\n[search]\nkind = "throughput"\n', ["cases"]),
    ],
)
def test_pictures_are_those_there_is_something_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: str, pictures: list[str]
) -> None:
    texts: list[list[str]] = []

    def save(figure: Any, path: Path) -> Path:  # small: drawing is what takes time
        import matplotlib.pyplot as plt

        texts.append([text.get_text() for text in figure.texts])
        figure.savefig(io.BytesIO(), dpi=20)
        plt.close(figure)
        return path

    monkeypatch.setattr(style, "save", save)
    study, findings = found(tmp_path, more)
    drawn = plots.draw(study, findings, tmp_path / "out", "one")
    assert sorted(path.name for path in drawn) == [f"one-{name}.png" for name in pictures]
    assert all(any(text.startswith("simulated · ") for text in told) for told in texts)


def test_a_sweep_has_a_line_for_each_variant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named: dict[str, set[str]] = {}

    def save(figure: Any, path: Path) -> Path:
        import matplotlib.pyplot as plt

        named[path.name] = {text.get_text() for text in figure.axes[0].texts}
        plt.close(figure)
        return path

    monkeypatch.setattr(style, "save", save)
    variants = "".join(f'[[variants]]\nname = "v{i}"\n' for i in range(len(style.COLOURS) + 2))
    study, findings = found(tmp_path, variants + "[sweep]\nworkload.rate = [1, 2]\n")
    plots.draw(study, findings, tmp_path / "out", "one")
    assert {f"v{i}" for i in range(len(style.COLOURS) + 2)} <= named["one-sweep.png"]


def test_a_picture_is_written_whole_and_the_same_each_time(tmp_path: Path) -> None:
    written = []
    for name in ("one.png", "two.png"):
        figure, axes = style.new_figure(2.0, 1.5)
        axes.plot([1, 2], [3, 4])
        written.append(style.save(figure, tmp_path / "out" / name).read_bytes())
    with Image.open(tmp_path / "out" / "one.png") as picture:
        assert picture.size == (320, 240)
    assert written[0] == written[1]
    assert len(list((tmp_path / "out").iterdir())) == 2


def test_failed_points_are_in_no_picture(tmp_path: Path) -> None:
    study, findings = found(tmp_path)
    findings = [Finding("", {}, 3, "seed 3", error="no")]
    assert plots.draw(study, findings, tmp_path / "out", "one") == []


def test_labels_keep_apart_and_in_order() -> None:
    placed = style.spread_labels([0.5, 0.52, 0.9, 0.51], 0.1)
    assert placed[2] == 0.9
    assert placed[0] < placed[3] < placed[1]
    ordered = sorted(placed)
    assert all(high - low >= 0.1 - 1e-9 for low, high in itertools.pairwise(ordered))
