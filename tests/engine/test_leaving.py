"""Clients that leave or are refused take nothing from those that ask the same pictures and stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.harness.leaving import CLIENTS
from tests.engine.harness.processes import NO_PLUGIN, OUR_PLUGIN, run_program

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("side", ["ours", pytest.param("pool", marks=pytest.mark.once)])
def test_all_that_stay_are_answered(llava: Path, tmp_path: Path, side: str) -> None:
    found = run_program("tests.engine.harness.leaving", llava, side, environment=OUR_PLUGIN, log=tmp_path / "log")
    assert {case: answered for case, (_, answered, _) in found.items()} == {
        case: stayed for case, (stayed, _, _) in found.items()
    }
    assert CLIENTS / 2 < found["at_random"][0] < CLIENTS
    assert found["sent_before"][2] == 3


@pytest.mark.once
def test_stock_fails_them(llava: Path, tmp_path: Path) -> None:
    """If it does so no longer, `vllm_omni_sched/engine/unsent.py` may go."""
    found = run_program("tests.engine.harness.leaving", llava, "stock", environment=NO_PLUGIN, log=tmp_path / "log")
    assert all(found[case][1] < found[case][0] for case in ("prepared_and_dropped", "dropped_in_between"))
