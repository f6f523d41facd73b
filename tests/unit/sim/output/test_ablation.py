"""The picture of an ablation: which studies have one, and what is in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_omni_sched.sim.output.ablation import draw, mechanisms
from vllm_omni_sched.sim.study.evaluate import Finding

NAMES = ("none", "all", "only lane", "only order", "all but lane", "all but order")


def finding(variant: str, goodput: float = 1.0, seed: int = 1, error: str = "") -> Finding:
    summary = {
        "goodput_per_second": goodput,
        "itl_seconds": {"p99": 0.1 / goodput},
        "ttft_seconds": {"p50": 1.0 / goodput, "p99": 2.0 / goodput},
    }
    return Finding(variant, {}, seed, variant, summary=summary, error=error)


def test_mechanisms_that_were_alone_and_left_out() -> None:
    assert mechanisms([finding(name) for name in NAMES]) == ["lane", "order"]


@pytest.mark.parametrize("gone", NAMES)
def test_what_is_not_there_is_not_compared(gone: str) -> None:
    left = [finding(name, error="" if name != gone else "died") for name in NAMES]
    whole = [] if gone in ("none", "all") else ["order"] if gone.endswith("lane") else ["lane"]
    assert mechanisms(left) == whole


def test_other_studies_are_no_ablation() -> None:
    assert mechanisms([finding("stock"), finding("ours"), finding("only one of them")]) == []


def test_the_picture_follows_what_was_found(tmp_path: Path) -> None:
    findings = [finding(name, 1.0 + at, seed) for at, name in enumerate(NAMES) for seed in (1, 2)]
    first = draw("one", findings, searched=False, path=tmp_path / "a.png").read_bytes()
    assert first.startswith(b"\x89PNG")
    assert draw("one", findings, searched=False, path=tmp_path / "b.png").read_bytes() == first
    findings[-1].summary["goodput_per_second"] = 9.0
    assert draw("one", findings, searched=False, path=tmp_path / "c.png").read_bytes() != first
