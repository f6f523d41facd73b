"""Streams that are decoded as they arrive, ended after the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.live import PATIENCE
from vllm_omni_sched.video.live import LiveVideo, Sampling


@pytest.fixture
def live() -> Iterator[Callable[..., LiveVideo]]:
    """Makes streams, and ends them."""
    made: list[LiveVideo] = []

    def make(sampling: Sampling | None = None, **options: Any) -> LiveVideo:
        made.append(LiveVideo(sampling, **{"silence_seconds": PATIENCE, "slots": 80, **options}))
        return made[-1]

    yield make
    for one in made:
        one.close()
