"""What a worker holds of a session's blocks is what the scheduler has, whatever became of the blocks in between."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from vllm_omni_sched import OmniScheduler, compat
from vllm_omni_sched.engine.sessions.messages import SessionDelta, SessionReceiver
from vllm_omni_sched.testing import make_request, make_scheduler, make_session_update, run_step
from vllm_omni_sched.testing import scheduler as testing_scheduler

BLOCK = 4
WINDOW = 12


class Session:
    """A session with the receiver of its worker."""

    def __init__(self, **config: Any) -> None:
        self.scheduler: Any = make_scheduler(
            OmniScheduler, async_scheduling=False, block_size=BLOCK, options={"metrics": False}, **config
        )
        strip = compat.strip_feature()
        self.worker = SessionReceiver(lambda feature: strip(feature, False))
        self.messages: list[str] = []
        self._how = {"max_tokens": 2, "block_size": BLOCK, "ignore_eos": True}

    def turn(self, num_tokens: int) -> None:
        """One more chunk, and its two tokens; after each message the worker has the scheduler's table."""
        make = make_session_update if "s" in self.scheduler.requests else make_request
        self.scheduler.add_request(
            make("s", num_tokens, **{"resumable": True} if make is make_request else {}, **self._how)
        )
        for _ in range(3):
            self.step()

    def step(self) -> None:
        new = []

        def look(output: Any) -> None:
            kinds = [type(one).__name__ for one in output.scheduled_new_reqs]
            blocks = self.scheduler.kv_cache_manager.get_block_ids("s")
            table = tuple(list(group) for group in blocks)
            self.worker.expand(output)
            for kind, one in zip(kinds, output.scheduled_new_reqs, strict=True):
                assert one.block_ids == table
                new.append(kind)

        schedule = self.scheduler.schedule

        def seen() -> Any:
            output = schedule()
            look(output)
            return output

        self.scheduler.schedule = seen
        try:
            run_step(self.scheduler)
        finally:
            del self.scheduler.schedule
        self.messages += new

    def move_blocks(self) -> None:
        """The session gets other blocks at the same places, but for the last, and nobody is told."""
        (manager,) = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        blocks = manager.req_to_blocks.pop("s")
        manager.req_to_blocks["s"] = [*reversed(blocks[:-1]), blocks[-1]]


def test_chunks_are_deltas() -> None:
    session = Session()
    for num_tokens in (9, 5, 6, 7):
        session.turn(num_tokens)
    assert session.messages == ["SessionStart", *["SessionDelta"] * 3]


@pytest.mark.parametrize("turns", [1, 3])
def test_blocks_that_were_moved_are_sent_in_full(turns: int) -> None:
    session = Session()
    for _ in range(turns):
        session.turn(15)
    session.move_blocks()
    session.turn(5)
    assert session.messages[-1] == "SessionStart"
    session.turn(5)
    assert session.messages[-1] == SessionDelta.__name__


@pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])
def test_a_session_that_was_preempted_starts_over(v2: bool) -> None:
    session = Session(use_v2_model_runner=v2)
    session.turn(9)
    session.turn(9)
    request = session.scheduler.requests["s"]
    session.scheduler.add_request(make_session_update("s", 6, **session._how))
    session.step()
    session.scheduler.running.remove(request)
    session.scheduler._preempt_request(request, 0.0)
    assert not session.scheduler.omni.sessions.sender.trackers
    for _ in range(3):
        session.step()
    session.turn(5)
    assert session.messages[-1] == "SessionStart"


def test_a_sliding_window_leaves_null_blocks_at_the_worker_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def spec(**how: Any) -> Any:
        return SlidingWindowSpec(**how, sliding_window=WINDOW)

    monkeypatch.setattr(testing_scheduler, "FullAttentionSpec", spec)
    session = Session()
    (manager,) = session.scheduler.kv_cache_manager.coordinator.single_type_managers
    assert type(manager) is SlidingWindowManager
    for num_tokens in (9, 14, 6, 30, 7):
        session.turn(num_tokens)
    assert session.messages == ["SessionStart", *["SessionDelta"] * 4]
    assert [block.is_null for block in manager.req_to_blocks["s"]].count(True) > 10
