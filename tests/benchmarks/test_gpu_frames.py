"""The benchmark of frames that stay on a GPU, with memory of the host in place of a device's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import device
from benchmarks.gpu.frames import __main__ as program
from benchmarks.gpu.frames.measure import compared
from benchmarks.gpu.nvdec.clips import encoded
from tests.support.host_device import HostDriver
from vllm_omni_sched.video.frame_memory import BLOCK
from vllm_omni_sched.video.on_device import FramesReason
from vllm_omni_sched.video.options import VideoOptions
from vllm_omni_sched.video.pool import kinds
from vllm_omni_sched.video.pool.kinds import DecoderKind, cpu_kind
from vllm_omni_sched.video.sandbox.seccomp import Profile
from vllm_omni_sched.video.service import FlashCodec

CLIP = {"seconds": 1, "width": 96, "height": 64, "rate": 40, "gop": 10}


@pytest.fixture
def services() -> Iterator[tuple[FlashCodec, FlashCodec]]:
    """A service whose frames stay, with room for 40 frames of the clip, and one whose frames go to the host."""
    options = VideoOptions.model_validate({"decoders": 1, "nvdec": "auto", "device_bytes": BLOCK})

    def kinds_of(decoder: str) -> tuple[DecoderKind, ...]:
        cards = DecoderKind("nvdec", f"tests.support.nvcodec:{decoder}", Profile.DEVICE, (0,))
        return cards, cpu_kind(options)

    with (
        FlashCodec(
            options, kinds=kinds_of("sharing_card"), place=FramesReason.ON_DEVICE, device_driver=HostDriver()
        ) as stay,
        FlashCodec(options, kinds=kinds_of("card")) as through_host,
    ):
        yield stay, through_host


@pytest.mark.slow  # processes that import torch
def test_both_ways_give_the_same_frames_or_say_why_not(services: tuple[FlashCodec, FlashCodec]) -> None:
    rows = compared("h264", encoded("h264", **CLIP), *services, 2, torch.device("cpu"))
    assert [(row["frames"], row["wrong"], row["stay_seconds"]["samples"]) for row in rows] == [(32, 0, 2), (40, 0, 2)]
    assert program.complaints(rows) == []
    assert list(program.table(rows, "no GPU").columns[1].cells) == ["32", "40"]
    longer = compared("h264", encoded("h264", **{**CLIP, "seconds": 3}), *services, 1, torch.device("cpu"))
    assert [row.get("refused") for row in longer] == [None, "device_too_large"]
    assert program.complaints(longer) == ["h264: frames went to the host, device_too_large"]
    assert program.complaints([{**rows[0], "wrong": 2}]) == ["h264: 2 frames differ"]


def test_where_no_gpu_decodes_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(device, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(kinds, "engines_here", lambda at_most: ())
    with pytest.raises(SystemExit, match="cannot decode on this GPU: option 'nvdec' is 'on'"):
        program.main(["--out", str(tmp_path)])
