"""The lanes benchmark without a GPU: arguments, what is made of the samples, turns on a device that is none."""

from __future__ import annotations

import itertools
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from benchmarks.gpu.lanes import run as runner
from benchmarks.gpu.lanes.models import VisionTower
from benchmarks.gpu.lanes.report import Sample, lines
from benchmarks.gpu.lanes.variants import DECODE_ALONE, ENCODE_ALONE, Variant, variants
from tests.support.stream_device import HostDevice


def sample(milliseconds: float, images: float = 0.0) -> Sample:
    """A hundred gaps, the last of which is twice as long."""
    return Sample([milliseconds / 1e3] * 99 + [milliseconds / 500], images)


ROUNDS = {
    "decode alone": [sample(10.0), sample(20.0), sample(10.0)],  # the second round met a slow moment
    "encode alone": [Sample((), 100.0), Sample((), 50.0), Sample((), 100.0)],
    "side stream": [sample(15.0, 90.0), sample(30.0, 45.0), sample(15.0, 90.0)],
    "lane, share 0.5": [sample(11.0, 60.0), sample(22.0, 30.0), sample(11.0, 60.0)],
}


def test_ratios_are_taken_round_by_round():
    found = {line.variant: line for line in lines(ROUNDS)}
    side = found["side stream"]
    assert side.itl_p50_ratio == pytest.approx(1.5)
    assert side.itl_p99_ratio == pytest.approx(1.5)
    assert side.images_ratio == pytest.approx(0.9)
    assert side.itl_p50.median == pytest.approx(0.015)
    assert found["encode alone"].itl_p99 is None
    assert found["decode alone"].images is None


class Step:
    """A decode step that takes as long as one encode beside it."""

    def __init__(self, encoded: threading.Semaphore) -> None:
        self.encoded = encoded

    def on_stream(self) -> Any:
        return nullcontext()

    def __call__(self) -> None:
        assert self.encoded.acquire(timeout=20.0)


@pytest.mark.parametrize(
    "variant", [v for v in variants([16], [1.0, 0.5]) if v not in (DECODE_ALONE, ENCODE_ALONE)], ids=lambda v: v.name
)
def test_each_variant_encodes_while_tokens_go_on(variant: Variant, monkeypatch):
    device, encoded = HostDevice(), threading.Semaphore(0)
    monkeypatch.setattr(runner, "CudaDevice", lambda _, sms: device)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    tower = VisionTower(layers=2, hidden=64, heads=4).eval()
    tower.register_forward_hook(lambda *_: encoded.release())
    load = runner.Load(None, tower, torch.zeros(2, 3, 28, 28), 1)
    ticks = itertools.count()
    found = runner.run(variant, load, Step(encoded), 20.0, 2.0, clock=lambda: float(next(ticks)))
    assert set(found.gaps) == {1.0}
    assert found.images_per_second > 0
    assert "omni-sched-lane" not in {thread.name for thread in threading.enumerate()}
