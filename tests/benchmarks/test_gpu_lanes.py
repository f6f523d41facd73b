"""The lanes benchmark without a GPU: arguments, what is made of the samples, turns on a device that is none."""

from __future__ import annotations

import itertools
import json
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from benchmarks.gpu.lanes import __main__ as program
from benchmarks.gpu.lanes import run as runner
from benchmarks.gpu.lanes.models import HIDDEN, VOCABULARY, Decoder, VisionTower
from benchmarks.gpu.lanes.plot import picture
from benchmarks.gpu.lanes.report import Sample, lines, record, table
from benchmarks.gpu.lanes.variants import DECODE_ALONE, ENCODE_ALONE, Variant, variants
from tests.support.stream_device import HostDevice
from vllm_omni_sched.config.errors import LaneError


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


def test_the_aim_is_both_tokens_and_images():
    assert [line.variant for line in lines(ROUNDS) if line.meets_the_aim] == ["lane, share 0.5"]


def test_the_table_has_a_line_per_variant_and_says_what_was_refused():
    shown = table(lines(ROUNDS), {"lane, 16 SMs": "no green contexts"}, "some GPU")
    assert list(shown.columns[0].cells) == [*ROUNDS, "lane, 16 SMs"]
    assert list(shown.columns[1].cells)[-1] == "no green contexts"
    assert list(shown.columns[4].cells) == ["1.00", "", "1.50", "1.10", ""]


def test_the_record_is_in_seconds_and_can_be_written():
    rows = json.loads(json.dumps(record(lines(ROUNDS), {"lane, 16 SMs": "no green contexts"})))
    assert rows[2]["itl_p50_seconds"]["median"] == pytest.approx(0.015)
    assert rows[2]["images_of_alone"] == 0.9
    assert rows[-1] == {"variant": "lane, 16 SMs", "refused": "no green contexts"}
    assert "images_per_second" not in rows[0]


def test_the_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    assert picture(tmp_path / "lanes.png", lines(ROUNDS), "some GPU").stat().st_size > 0


def test_what_runs_alone_comes_first_and_no_name_twice():
    names = [variant.name for variant in variants([16, 32], [1.0, 0.5])]
    assert names[:2] == [DECODE_ALONE.name, ENCODE_ALONE.name]
    assert len(names) == len(set(names)) == 13


def test_shapes_are_those_of_a_7b_model_and_a_vit_l():
    with torch.device("meta"):
        assert Decoder(1, 2, 8)(torch.randn(2, HIDDEN)).shape == (2,)
        assert Decoder(1, 2, 8).head.out_features == VOCABULARY
        pauses: list[None] = []
        assert VisionTower()(torch.randn(3, 3, 336, 336), lambda: pauses.append(None)).shape == (3, 576, HIDDEN)
    assert len(pauses) == 24


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


def test_a_part_of_the_device_that_cannot_be_had_is_a_refusal_of_that_variant_alone(monkeypatch):
    def run(variant: Variant, *_: Any, **__: Any) -> Sample:
        if variant.sms is not None:
            raise LaneError("no green contexts")
        return sample(10.0, 5.0)

    monkeypatch.setattr(program, "build", lambda options: None)
    monkeypatch.setattr(runner, "DecodeStep", lambda load, prior: None)
    monkeypatch.setattr(runner, "run", run)
    rounds, refused = program.measure(program.parse(["--sms", "16", "--shares", "1", "--rounds", "2"]))
    assert refused == {"side stream, 16 SMs": "no green contexts", "lane, 16 SMs": "no green contexts"}
    assert {len(samples) for samples in rounds.values()} == {2}
    assert not set(rounds) & set(refused)
