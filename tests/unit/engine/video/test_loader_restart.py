"""The service of a process: one that has died is replaced."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_omni_sched.engine.video import choice, service
from vllm_omni_sched.engine.video.metrics import VideoMetrics
from vllm_omni_sched.video import service as service_module


class Service:
    """Dies when told."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.alive, self.closed = True, False

    def start(self) -> None: ...

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def metrics(monkeypatch: pytest.MonkeyPatch) -> VideoMetrics:
    metrics = VideoMetrics()
    for name, value in (("_metrics", metrics), ("_service", None), ("_refused", False)):
        monkeypatch.setattr(service, name, value)
    monkeypatch.setattr(service_module, "FlashCodec", Service)
    return metrics


def value(metrics: VideoMetrics, name: str) -> float:
    return metrics._metrics[name].collect()[0].samples[0].value


def test_a_service_that_has_died_is_replaced_and_counted(metrics: VideoMetrics) -> None:
    first: Any = service.get()
    assert service.get() is first
    first.alive = False
    second: Any = service.get()
    assert second is not first
    assert (first.closed, second.closed) == (True, False)
    assert value(metrics, "video_service_restarts_total") == 1


def test_no_decoder_runs_when_the_service_has_ended(metrics: VideoMetrics) -> None:
    service.get()
    metrics.busy(1, 2)
    service.close()
    assert value(metrics, "video_decoders_busy") == value(metrics, "video_decoders") == 0


@pytest.mark.parametrize("given", [None, "abc", {"video": "abc"}, {"video": None}])
def test_arguments_that_are_no_mapping_are_left_to_vllm(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_VIDEO_LOADER_BACKEND", raising=False)
    assert not choice.is_chosen(SimpleNamespace(media_io_kwargs=given, scheduler_cls=None))
