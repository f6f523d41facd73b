"""What frames cost."""

import pytest

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.costs.base import SourceKind
from vllm_omni_sched.sim.costs.hardware import CoreDecoder, NvdecDecoder, device
from vllm_omni_sched.sim.work import Clip

HD = Clip(60.0, 30.0, 1280, 720, 60, 32)
FULL = HD._replace(width=1920, height=1080)


@pytest.mark.parametrize(
    ("codec", "frames", "seconds", "off"),
    [("h264", 1800, 3.71, 0.001), ("h264", 973, 1.65, 0.25), ("hevc", 973, 2.51, 0.35), ("av1", 704, 1.18, 0.25)],
)
def test_a_core_as_it_was_measured(codec, frames, seconds, off):
    assert CoreDecoder().frames_seconds(HD._replace(codec=codec), frames) == pytest.approx(seconds, rel=off)
    assert CoreDecoder.source.kind is SourceKind.MEASURED


@pytest.mark.parametrize(
    ("kind", "codec", "rate"),
    [
        ("l40s", "h264", 903),
        ("l40s", "av1", 1018),
        ("a6000", "hevc", 1415),
        ("a100-80gb", "h264", 771 * 1290 / 1860),
        ("h200-141gb", "hevc", 1316 * 1545 / 1860),
    ],
)
def test_nvdec_as_its_maker_says(kind, codec, rate):
    decoder = NvdecDecoder(device(kind))
    assert 1000 / decoder.frames_seconds(FULL._replace(codec=codec), 1000) == pytest.approx(rate)
    assert decoder.source.kind is SourceKind.PUBLISHED


@pytest.mark.parametrize("decoder", [CoreDecoder(), NvdecDecoder(device("h100-80gb"))])
def test_pixels_and_frames_are_what_counts(decoder):
    assert decoder.frames_seconds(HD, 20) == pytest.approx(20 * decoder.frames_seconds(HD, 1))
    assert decoder.frames_seconds(FULL, 1) == pytest.approx(2.25 * decoder.frames_seconds(HD, 1))


def test_a_codec_that_cannot_be_decoded():
    with pytest.raises(ConfigError, match="'a100-80gb' decode h264, hevc, vp9, not 'av1': set decoders = 'cpu'"):
        NvdecDecoder(device("a100-80gb")).frames_seconds(HD._replace(codec="av1"), 1)
    with pytest.raises(ConfigError, match="decoding on a core was measured for av1, h264, hevc, not for 'h265'"):
        CoreDecoder().frames_seconds(HD._replace(codec="h265"), 1)
