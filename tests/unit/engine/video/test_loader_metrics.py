"""What of video decoding is counted, and that it stays on /metrics."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from vllm_omni_sched.config.errors import DecoderError, VideoDeadlineError, VideoInputError, VideoLimitError
from vllm_omni_sched.engine.video.metrics import OUTCOMES, VideoMetrics
from vllm_omni_sched.monitor.metrics import PREFIX
from vllm_omni_sched.video.results import STAGES, Report

REPORT = Report(
    seconds={stage: 0.02 * n for n, stage in enumerate(STAGES)},
    pieces=3,
    decoded=30,
    used=8,
    copied_bytes=1000,
    fallbacks=("no_pts", "no_pts"),
)


def shown(metrics: VideoMetrics) -> dict[str, float]:
    """Samples by name and labels, without the prefix."""
    registry = CollectorRegistry()
    registry.register(metrics)
    lines = generate_latest(registry).decode().splitlines()
    samples = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name.removeprefix(PREFIX): float(value) for name, value in samples}


def test_a_video_is_counted():
    metrics = VideoMetrics()
    metrics.busy(1, 2)
    metrics.loaded(REPORT)
    metrics.loaded(REPORT)
    metrics.missed(3)
    metrics.restarted("pyav")
    found = shown(metrics)
    assert found['video_stage_seconds_sum{stage="decode"}'] == pytest.approx(0.08)
    assert found['video_stage_seconds_count{stage="wait"}'] == 2
    assert found['video_frames_total{frames="decoded"}'] == 60
    assert found['video_frames_total{frames="used"}'] == 16
    assert found['video_frames_total{frames="missing"}'] == 3
    assert found["video_copied_bytes_total"] == 2000
    assert found['video_fallbacks_total{reason="no_pts"}'] == 4
    assert found['videos_total{outcome="decoded"}'] == 2
    assert (found["video_decoders_busy"], found["video_decoders"]) == (1, 2)
    assert found["video_worker_restarts_total"] == 1


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (VideoInputError("x"), "bad_input"),
        (VideoLimitError("x"), "limit"),
        (VideoDeadlineError("x"), "deadline"),
        (DecoderError("x"), "no_decoder"),
    ],
)
def test_an_error_is_counted_by_its_kind(error, outcome):
    metrics = VideoMetrics()
    metrics.failed(error)
    found = shown(metrics)
    assert [name for name in OUTCOMES if found[f'videos_total{{outcome="{name}"}}']] == [outcome]


SERVER = """
from tests.unit.engine.video.test_loader_metrics import REPORT
from vllm_omni_sched.engine.video.metrics import VideoMetrics
metrics = VideoMetrics()
metrics.attach()
metrics.busy(1, 2)
metrics.loaded(REPORT)
"""
SCRAPE = """
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def test_several_api_servers_are_summed(tmp_path):
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}

    def run(code: str) -> str:
        return subprocess.run(
            [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
        ).stdout

    run(SERVER)
    run(SERVER)
    page = run(SCRAPE)
    assert 'vllm:omni_sched_video_frames_total{frames="used"} 16.0' in page
    assert 'vllm:omni_sched_videos_total{outcome="decoded"} 2.0' in page
