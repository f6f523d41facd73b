"""VVC (H.266): decoded by FFmpeg on the CPU, in sequence, because its packets are not read here.

No encoder comes with PyAV. ``data/gradient.266`` has 48 frames of a moving gradient, 64x48, with B-frames, encoded by
vvenc.
"""

from __future__ import annotations

import io
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from tests.support.nvcodec import NvCodec, indexed
from vllm_omni_sched.video.decoders.nvdec.decoder import NvdecDecoder
from vllm_omni_sched.video.decoders.nvdec.library import Library, NvdecError
from vllm_omni_sched.video.decoders.nvdec.limits import Refusal
from vllm_omni_sched.video.options import VideoOptions
from vllm_omni_sched.video.service import FlashCodec

RAW = (Path(__file__).parent / "data" / "gradient.266").read_bytes()
WANTED = [0, 9, 31, 47]

pytestmark = pytest.mark.skipif("vvc" not in av.codecs_available, reason="this PyAV has no decoder of VVC")


def in_mp4() -> bytes:
    file = io.BytesIO()
    with av.open(io.BytesIO(RAW)) as source, av.open(file, "w", format="mp4") as out:
        stream = out.add_mux_stream("vvc", rate=Fraction(30), width=64, height=48)
        packets = (packet for packet in source.demux(video=0) if packet.size)
        for number, packet in enumerate(packets):
            packet.stream, packet.time_base = stream, Fraction(1, 30)
            packet.pts = packet.dts = number  # decoding times: which pictures are shown when is in the packets
            out.mux(packet)
    return file.getvalue()


@pytest.mark.parametrize("data", [RAW, in_mp4()], ids=["raw", "mp4"])
def test_frames_are_those_of_a_plain_decode(data: bytes) -> None:
    with FlashCodec(VideoOptions(decoders=1)) as codec:
        found = codec.load(data, lambda index: WANTED)
    assert found.index.codec == "vvc"
    assert found.report.fallbacks == ("codec",)
    with av.open(io.BytesIO(data)) as file:
        shown = [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]
    assert len(shown) == 48
    assert np.array_equal(found.frames, [shown[number] for number in WANTED])


def test_no_gpu_decodes_it() -> None:
    index, packets = indexed(in_mp4())
    with pytest.raises(NvdecError) as raised:
        NvdecDecoder(library=Library(NvCodec())).open(index, packets, memoryview(b""))
    assert raised.value.reason is Refusal.CODEC
