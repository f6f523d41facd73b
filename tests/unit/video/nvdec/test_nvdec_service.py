"""NVDEC decoders behind the service: their videos, and those that fall back."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.nvcodec import plain, video
from vllm_omni_sched.video.options import VideoOptions
from vllm_omni_sched.video.pool.kinds import DecoderKind, cpu_kind
from vllm_omni_sched.video.sandbox.seccomp import Profile
from vllm_omni_sched.video.service import FlashCodec

WANTED = [0, 7, 16, 31, 47]


@pytest.mark.slow  # a process that imports torch
def test_a_card_decodes_what_it_can_and_processors_the_rest() -> None:
    options = VideoOptions(decoders=1)
    cards = DecoderKind("nvdec", "tests.support.nvcodec:card", Profile.DEVICE, (0,))
    codec = FlashCodec(options, kinds=(cards, cpu_kind(options)))
    try:
        for pixels, reasons in (("yuv420p", set()), ("yuv444p", {"decoder_refused"})):
            data = video(pixels=pixels, options="bf=2 sc_threshold=0")
            decoded = codec.load(data, lambda index: WANTED)
            whole = list(plain(data).values())
            assert decoded.indices == WANTED
            assert np.array_equal(decoded.frames, [whole[n] for n in WANTED])
            assert set(decoded.report.fallbacks) == reasons
        late = video(frames=192, options="bf=2 sc_threshold=0")
        decoded = codec.load(late, lambda index: [190])  # decoders open it by a start that no piece needs
        assert np.array_equal(decoded.frames, [list(plain(late).values())[190]])
        assert decoded.report.fallbacks == ()
    finally:
        codec.close()
