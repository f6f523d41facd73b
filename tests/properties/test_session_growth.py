"""What one more frame of a session costs does not depend on how many came before: counted, not timed."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from vllm_omni_sched import OmniScheduler
from vllm_omni_sched.engine.sessions.messages import SessionDelta
from vllm_omni_sched.items import FeatureList
from vllm_omni_sched.testing import make_data, make_item, make_request, make_scheduler, make_session_update, run_step

FRAME_TOKENS = 4
RELEASE_BATCH = 64


def frame(number: int) -> Any:
    return make_item(0, FRAME_TOKENS, f"frame-{number}", data=make_data(number, num_values=80))


class Session:
    """A realtime session that alternates frames and tokens."""

    def __init__(self, use_v2_model_runner: bool) -> None:
        self.scheduler = make_scheduler(
            OmniScheduler,
            use_v2_model_runner=use_v2_model_runner,
            enable_prefix_caching=True,
            options={"metrics": False, "release_batch_items": RELEASE_BATCH},
        )
        self.scheduler.add_request(make_request("s", FRAME_TOKENS, [frame(0)], resumable=True, max_tokens=1))
        self.num_frames = 1
        self._finish_turn()

    def grow(self, num_frames: int) -> Any:
        """Grow to so many frames; return the scheduler output that carried the last."""
        while self.num_frames < num_frames:
            update = make_session_update("s", FRAME_TOKENS, [frame(self.num_frames)], max_tokens=1)
            self.scheduler.add_request(update)
            self.num_frames += 1
            output = self._finish_turn()
        return output

    def _finish_turn(self) -> Any:
        step = run_step(self.scheduler)
        assert step.scheduled.num_scheduled_tokens == {"s": FRAME_TOKENS}
        run_step(self.scheduler)
        return step.scheduled

    @property
    def features(self) -> FeatureList:
        return self.scheduler.requests["s"].mm_features


@pytest.fixture(params=[False, True], ids=["V1", "V2"])
def session(request: pytest.FixtureRequest) -> Iterator[Session]:
    session = Session(request.param)
    yield session
    session.scheduler.add_request(make_session_update("s", last=True))
    assert not session.scheduler.requests


def test_worker_message(session: Session) -> None:
    early, late = session.grow(100), session.grow(2_000)
    for output in (early, late):
        [message] = output.scheduled_new_reqs
        assert isinstance(message, SessionDelta)
        assert [feature.identifier for feature in message.mm_features] == [f"frame-{99 if output is early else 1_999}"]
    assert len(pickle.dumps(late)) <= 8 * 1024
    assert len(pickle.dumps(late)) - len(pickle.dumps(early)) <= 64  # larger numbers, not more of them


def test_items_looked_at(session: Session) -> None:
    session.grow(200)
    touched, visited = session.features.items_touched, session.features.spans.spans_visited
    session.grow(400)
    by_200_frames = session.features.items_touched - touched
    session.grow(1_800)
    touched_late = session.features.items_touched
    session.grow(2_000)
    assert session.features.items_touched - touched_late <= by_200_frames + RELEASE_BATCH
    assert session.features.spans.spans_visited == visited == 0


def test_raw_data_leaves_memory(session: Session) -> None:
    session.grow(1_000)
    with_data = [i for i, feature in enumerate(session.features) if feature.data is not None]
    assert len(with_data) <= RELEASE_BATCH + 1
    assert with_data == list(range(1_000 - len(with_data), 1_000))
    assert session.features.with_data(3).data["values"].data.tolist() == [3] * 80


class CountedCalls:
    """Python calls in this package while it is open."""

    def __enter__(self) -> CountedCalls:
        self.calls = 0
        self._before = sys.getprofile()
        sys.setprofile(self._count)
        return self

    def __exit__(self, *raised: object) -> None:
        sys.setprofile(self._before)

    def _count(self, frame: Any, event: str, argument: Any) -> None:
        where = frame.f_code.co_filename
        self.calls += event == "call" and "/vllm_omni_sched/" in where and "/vllm_omni_sched/testing/" not in where


def test_calls_of_ours_by_frame(session: Session) -> None:
    """Our calls per frame add up over many sessions. Most frames release nothing; a release costs more."""
    session.grow(RELEASE_BATCH + 2)
    calls = []
    for _ in range(16):
        with CountedCalls() as of_ours:
            session.grow(session.num_frames + 1)
        calls.append(of_ours.calls)
    assert 10 < sorted(calls)[8] <= 80
