"""What `benchmarks.preprocess` makes of what its servers measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.harness.server import record
from benchmarks.preprocess import OURS, STOCK
from benchmarks.preprocess.__main__ import MEASURES, parse, picture_url
from benchmarks.preprocess.probe import PERIOD_SECONDS, SAMPLE, lags


def test_a_stall_counts_for_as_long_as_it_lasted(tmp_path: Path) -> None:
    samples = [(1.0, 0.0001), (1.1, 4.5 * PERIOD_SECONDS), (2.5, 1.0)]
    (tmp_path / "1").write_bytes(b"".join(SAMPLE.pack(*one) for one in samples) + b"half")
    found = lags(tmp_path, 0.5, 2.0)
    assert found == pytest.approx([0.0001, *(PERIOD_SECONDS * at for at in (4.5, 3.5, 2.5, 1.5, 0.5))])


def test_ratios_are_those_of_rounds() -> None:
    def rounds(*seconds: float) -> list[dict[str, object]]:
        return [{**dict.fromkeys(MEASURES, one), "answers": ["a"]} for one in seconds]

    records = record({STOCK: rounds(1.0, 2.0, 4.0), OURS: rounds(0.5, 0.4, 1.0)}, MEASURES)
    ours = next(one for one in records if one["variant"] == OURS)
    assert (ours["median"], ours["of_stock"], ours["same_answers"]) == (0.5, 0.25, True)


def test_every_picture_is_another_one(tmp_path: Path) -> None:
    options = parse(["--width", "64", "--inline"])
    assert picture_url(tmp_path, 0, options) == picture_url(tmp_path, 0, options)
    assert picture_url(tmp_path, 0, options) != picture_url(tmp_path, 1, options)
