"""What the learned control brought, apart for sizes that training has seen: from the settings themselves."""

import importlib
import sys
from pathlib import Path

from benchmarks.learning.settings import TEST, TRAINING, Setting

DOCS = Path(__file__).parents[2] / "docs"
sys.path.insert(0, str(DOCS))
learning_tables = importlib.import_module("learning_tables")
sys.path.remove(str(DOCS))


def test_a_setting_knows_that_its_sizes_are_those_of_training():
    assert any(setting.has_sizes_of_training for setting in TRAINING)
    assert [setting.name for setting in TEST if not setting.has_sizes_of_training] == ["video-clips"]
    inside = Setting("x", {"kind": "mix", "rate": 1.0, "parts": [{"kind": "realtime"}, {"kind": "text"}]})
    outside = Setting("y", {"kind": "day-night", "rate": 1.0, "season_seconds": 60.0, "of": {"kind": "realtime"}})
    assert inside.has_sizes_of_training
    assert not outside.has_sizes_of_training


def test_the_gain_is_shown_apart_for_sizes_that_training_has_not_seen():
    gains = {"azure-lmm": 0.02, "text, 32B on 2 A100": 0.04, "video-clips": -0.05}
    records = [
        {"setting": setting, "control": control, "learned_more": [gain * (control != "learned"), 0, 0]}
        for setting, gain in gains.items()
        for control in ("adaptive", "learned")
    ]
    text = learning_tables._by_sizes(records)
    assert "| beside | sizes drawn in training too (2 settings) | other sizes (1 setting) |" in text
    assert "| adaptive | +3.00 | -5.00 |" in text
    assert "learned |" not in text
