"""The contract of all lanes, kept by the one that is a stream, on a device of the double."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contracts.test_lanes import *  # noqa: F403 - the same tests, for this lane alone
from tests.contracts.test_lanes import on_cuda
from tests.support.lanes import HELD, LONG, RELEASED, work
from vllm_omni_sched.lanes import StreamLane


@pytest.fixture
def lane() -> Iterator[StreamLane]:
    RELEASED.clear()
    HELD[:2] = bytes(2)
    lane = on_cuda(work, capacity=8)
    yield lane
    RELEASED.set()
    lane.close(LONG)
    assert lane.held == len(lane.poll())
