"""Pictures of studies, from their result files."""

import json
from pathlib import Path

from benchmarks.harness.style import COLOURS, colours_of
from benchmarks.studies.plot import draw


def written(folder: Path, *results: dict) -> Path:
    path = folder / "one.json"
    path.write_text(json.dumps({"scenario": {"name": "one", "slo": {"attainment": 0.9}}, "results": results}))
    return path


def test_a_study_has_the_picture_that_there_is_something_for(tmp_path: Path) -> None:
    case = {"variant": "7B: stock", "found": {"kind": "max_rate", "value": 2.0}}
    assert draw(written(tmp_path, case, {**case, "variant": "7B: ours"})) == tmp_path / "one-cases.png"
    over_time = {"seconds": [0.0, 1.0], "requests": [3, 4], "within_slo": [None, 0.5], "serving llm": [1.0, 2.0]}
    other = {**over_time, "serving llm": [2.0, 2.0]}
    runs = ({"variant": "stock", "over_time": over_time}, {"variant": "ours", "over_time": other})
    assert draw(written(tmp_path, *runs)) == tmp_path / "one-over-time.png"
    assert draw(written(tmp_path, {"variant": "stock", "summary": {}})) is None


def test_ours_and_stock_have_their_colours_in_every_picture() -> None:
    teal, red, blue, brown, *_ = COLOURS
    assert colours_of(["stock as shipped", "stock at its best", "split", "ours at its best"]) == {
        "stock as shipped": red,
        "stock at its best": blue,
        "split": brown,
        "ours at its best": teal,
    }
    assert colours_of(["a", "b"]) == {"a": teal, "b": red}
