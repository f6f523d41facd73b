"""Options, what they say about themselves, and which decoders come of them."""

from __future__ import annotations

import os

import pytest
from pydantic import ValidationError

from vllm_omni_sched.config.errors import ConfigError, VideoLimitError
from vllm_omni_sched.config.options import Toggle
from vllm_omni_sched.video.options import VideoOptions
from vllm_omni_sched.video.pool import kinds


def test_defaults_can_be_used() -> None:
    options = VideoOptions()
    assert options.limits.max_pixels >= 7680 * 4320
    assert kinds.cpu_kind(options).devices == (kinds.NO_DEVICE,) * len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("decoders", 0),
        ("decoders", "all"),
        ("decoders", True),
        ("nvdec_engines", 0),
        ("deadline_seconds", 0),
        ("worker_memory_bytes", (128 << 20) - 1),
        ("nvdec", "perhaps"),
        ("max_pixel", 5),
    ],
)
def test_what_is_refused(option: str, value: object) -> None:
    with pytest.raises(ValidationError, match=option):
        VideoOptions.model_validate({option: value})


def test_as_yaml_has_them() -> None:
    options = VideoOptions.model_validate({"nvdec": False, "deadline_seconds": 5, "decoders": 3})
    assert options.nvdec is Toggle.OFF
    assert options.deadline_seconds == 5.0
    assert len(kinds.cpu_kind(options).devices) == 3


def test_limits_name_the_option_and_the_figures() -> None:
    limits = VideoOptions(max_pixels=100).limits
    limits.check_size(10, 10)
    with pytest.raises(VideoLimitError, match=r"101 pixels \(101x1\), but option 'max_pixels' allows 100"):
        limits.check_size(101, 1)


def test_gpus() -> None:
    asked: list[int | None] = []

    def engines(at_most: int | None) -> tuple[int, ...]:
        asked.append(at_most)
        return (0, 1, 0, 1)

    kind = kinds.nvdec_kind(VideoOptions(nvdec=Toggle.AUTO, nvdec_engines=2), engines)
    assert kind is not None
    assert (kind.name, kind.devices) == (kinds.NVDEC, (0, 1, 0, 1))
    assert kinds.nvdec_kind(VideoOptions(), engines) is None  # off, unless it is asked for
    assert asked == [2]


def test_no_gpus() -> None:
    assert kinds.nvdec_kind(VideoOptions(nvdec=Toggle.AUTO), lambda _: ()) is None
    with pytest.raises(ConfigError, match="'nvdec' is 'on'"):
        kinds.nvdec_kind(VideoOptions(nvdec=Toggle.ON), lambda _: ())
