"""`vllm-omni-sched calibrate`: calls that make no sense, and what it shows. An engine: `tests/engine`."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from vllm_omni_sched.cli import app
from vllm_omni_sched.cli.calibrate import screen


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--engine-args", "{"], "--engine-args is not JSON"),
        (["--engine-args", "[1]"], "must be a JSON object"),
        (["--engine-args", '{"model": "other"}'], "it is the command's argument"),
        (["--image-size", "640"], "must be like 640x480, got '640'"),
        (["--image-size", "0x480"], "must be like 640x480"),
        (["--starts", "2"], "pass --server too"),
        (["--out", "/nowhere/at/all.json"], "there is no folder /nowhere/at"),
    ],
)
def test_a_call_that_makes_no_sense(words: list[str], said: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["calibrate", "MODEL", *words], catch_exceptions=False)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())


def test_the_screen() -> None:
    cost = {"base_seconds": 0.05, "per_item": 0.0, "per_embed": 5e-4}
    step = dict.fromkeys(
        ("base_seconds", "per_decode", "per_context_token", "per_prefill_token", "per_prefill_pair", "prefill_seconds"),
        4e-3,
    )
    costs = {
        "step": step,
        "encode": {"image": cost},
        "encode_in_lane": {"image": cost},
        "lane_slowdown": 1.5,
        "frontend": {"per_request": 2e-3, "per_text_token": 1e-5, "per_item": {"image": 15e-3}},
        "answer_seconds": 1e-3,
        "residuals": {"predicted_by_measured": {"min": 0.9, "median": 1.0, "max": 1.2}},
        "starts": {
            "server": {"steps": [1.0, 0.93, 1.07], "first_tokens": [1.0]},
            "with_lane": {"steps": [0.98, 1.02], "first_tokens": []},
        },
    }
    console = Console(width=100)
    with console.capture() as captured:
        console.print(screen(costs))
    shown = captured.get()
    assert "4 ms" in shown
    assert "encode in the lane, image" in shown
    assert "1.5 times as long" in shown
    assert "0.90 – 1.00 – 1.20" in shown
    assert "0.93 – 1.07" in shown
    assert "0.98 – 1.02" in shown
    assert "first tokens" not in shown  # one start says nothing of others
