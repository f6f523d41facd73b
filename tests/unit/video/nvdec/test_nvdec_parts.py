"""Colours to the bit, packets as a parser reads them, what a card says of itself, and a machine without one."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import av
import numpy as np
import pytest
import torch

from tests.support.nvcodec import NvCodec, indexed, plain, video
from vllm_omni_sched.video.decoders.convert import Converter
from vllm_omni_sched.video.decoders.nvdec.colour import SPACES, Colours, nv12_to_rgb
from vllm_omni_sched.video.decoders.nvdec.framing import framing
from vllm_omni_sched.video.decoders.nvdec.library import Library, NvdecError, gpus_of_engines
from vllm_omni_sched.video.decoders.nvdec.limits import Refusal


@pytest.mark.parametrize(("width", "height"), [(64, 48), (162, 98), (2, 2)])
@pytest.mark.parametrize("space", sorted(SPACES))
@pytest.mark.parametrize("full", [False, True])
def test_colours_are_those_of_a_cpu_to_the_bit(width: int, height: int, space: int, full: bool) -> None:
    samples = np.random.default_rng(width).integers(0, 256, (height * 3 // 2, width), dtype=np.uint8)
    frame = av.VideoFrame(width, height, "yuv420p")
    frame.colorspace, frame.color_range = space, 2 if full else 1
    chroma = samples[height:].reshape(height // 2, width // 2, 2)
    for plane, values in zip(frame.planes, (samples[:height], chroma[..., 0], chroma[..., 1]), strict=True):
        padded = np.zeros((plane.height, plane.line_size), np.uint8)
        padded[:, : values.shape[1]] = values
        plane.update(padded.tobytes())
    right = np.empty((height, width, 3), np.uint8)
    Converter().convert(frame, right)
    made = nv12_to_rgb(torch.from_numpy(samples), Colours(space, full))
    assert np.array_equal(made.numpy(), right)


@pytest.mark.parametrize(
    ("codec", "options"),
    [("libx264", "bf=2"), ("libx265", "x265-params=keyint=16:log-level=none")],
)
def test_packets_with_start_codes_decode_without_a_container(codec: str, options: str) -> None:
    data = video(codec, options=options)
    index, packets = indexed(data)
    made = framing(index.codec, index.extradata)
    assert made.length_bytes == 4
    assert not made.interlaced
    context = av.CodecContext.create(index.codec, "r")
    frames = []
    for at, row in enumerate(index.packets):
        body = packets[row["offset"] : row["offset"] + row["nbytes"]]
        frames += context.decode(av.Packet(made.packet(body, begins=at == 0)))
    frames += context.decode(None)
    pictures = [frame.to_ndarray(format="rgb24") for frame in frames]
    assert np.array_equal(pictures, list(plain(data).values()))


def test_streams_with_start_codes_and_other_codecs_go_as_they_are() -> None:
    assert framing("vp9", b"\x01\x02").packet(b"abc", begins=True) == b"abc"
    assert framing("h264", b"").packet(b"\0\0\0\1\x65", begins=True) == b"\0\0\0\1\x65"
    assert framing("av1", b"\x81\x00\x0c\x00seq").packet(b"obu", begins=True) == b"seqobu"
    assert framing("av1", b"\x81\x00\x0c\x00seq").packet(b"obu", begins=False) == b"obu"


def test_a_unit_that_is_cut_off_ends_with_its_packet() -> None:
    index, _ = indexed(video(options="bf=2"))
    made = framing("h264", index.extradata)
    assert made.packet(b"\0\0\0\2ab\0\0\0\xffcd", begins=False) == b"\0\0\0\1ab\0\0\0\1cd"


@pytest.mark.parametrize("codec", ["libx264", "libx265"])
def test_parameters_that_are_cut_off_are_an_error(codec: str) -> None:
    options = "x265-params=log-level=none" if codec == "libx265" else ""
    index, _ = indexed(video(codec, frames=2, options=options))
    for end in range(1, len(index.extradata) - 8):
        with pytest.raises(ValueError, match="truncated"):
            framing(index.codec, index.extradata[:end])


def test_profiles_with_scaling_lists_are_read_to_the_flag_of_fields() -> None:
    for tff in (False, True):
        options = "bf=2 profile=high x264-params=cqm=jvt:log-level=none" + (":tff=1" if tff else "")
        index, _ = indexed(video(frames=4, options=options))
        assert framing("h264", index.extradata).interlaced is tff


def test_engines_are_listed_by_their_number_so_that_the_first_few_are_spread_over_gpus() -> None:
    def library() -> Library:
        return Library(NvCodec(num_decoder_engines=3))

    assert gpus_of_engines(2, library, range(3)) == [0, 1, 0, 1]  # there is no third GPU
    assert gpus_of_engines(None, library, range(3)) == [0, 1, 0, 1, 0, 1]
    assert gpus_of_engines(1, lambda: Library(NvCodec()), range(3)) == [0, 1]
    assert gpus_of_engines(None, lambda: Library(NvCodec(supported=0)), [0]) == []


def test_there_are_no_engines_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PyNvVideoCodec", None)
    assert gpus_of_engines() == []


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PyNvVideoCodec", None)
    with pytest.raises(NvdecError, match="install PyNvVideoCodec") as raised:
        Library()
    assert raised.value.reason is Refusal.NO_LIBRARY


def test_without_a_driver_it_says_what_the_library_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    said = "Failed to load NVENC library: libnvidia-encode.so.1: no such file"
    (tmp_path / "PyNvVideoCodec.py").write_text(f"raise RuntimeError({said + chr(10) + 'STEPS'!r})")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "PyNvVideoCodec", raising=False)
    with pytest.raises(NvdecError, match="libnvidia-encode") as raised:
        Library()
    assert raised.value.reason is Refusal.NO_DRIVER
    assert "STEPS" not in str(raised.value)


def test_the_module_can_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PyNvVideoCodec", ModuleType("PyNvVideoCodec"))
    assert Library(NvCodec()).limits(0, "h264", "yuv420p").max_width == 8192
