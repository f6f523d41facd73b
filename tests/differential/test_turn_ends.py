"""Turns that end by a stop token with further steps in flight, and sessions that end by an update that is too long."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.engine import FinishReason

from vllm_omni_sched import OmniScheduler, compat
from vllm_omni_sched.testing import END_TOKEN, make_item, make_request, make_scheduler, make_session_update, run_step

MAX_STEPS = 60
MAX_MODEL_LEN = 24


def sampled_at(request: Any, position: int) -> int:
    """Return a stop token after two to five others in a turn of the session, depending on the length of its prompt."""
    stops = request.resumable and position == 2 + request.num_prompt_tokens % 4
    return END_TOKEN if stops else 500 + position


class Run:
    """A session beside a text request; `heard` are the tokens and the reasons for which each turn ended."""

    def __init__(self, scheduler_cls: type | None, **config: Any) -> None:
        options = {"metrics": False} if scheduler_cls is OmniScheduler else None
        self.scheduler: Any = make_scheduler(scheduler_cls, block_size=4, options=options, **config)
        self.heard: dict[str, list[Any]] = {"session": [], "beside": []}
        self.scheduler.add_request(make_request("beside", 5, max_tokens=30, block_size=4))
        self.chunk(6)

    def chunk(self, num_tokens: int, *, max_tokens: int = 10) -> None:
        make = make_session_update if "session" in self.scheduler.requests else make_request
        how = {} if make is make_session_update else {"resumable": True}
        item = make_item(0, 2, f"item of {num_tokens}")
        self.scheduler.add_request(make("session", num_tokens, [item], max_tokens=max_tokens, block_size=4, **how))

    def until(self, *, turns: int) -> None:
        """Step until the session has ended so many turns."""
        for _ in range(MAX_STEPS):
            if sum(isinstance(heard, FinishReason) for heard in self.heard["session"]) >= turns:
                return
            self.step()
        raise AssertionError(f"{MAX_STEPS} steps without an end of turn {turns}: {self.heard['session']}")

    def step(self) -> None:
        for outputs in (run_step(self.scheduler, sampled_at).outputs or {}).values():
            for output in outputs.outputs:
                self.heard[output.request_id] += output.new_token_ids
                if output.finish_reason is not None:
                    self.heard[output.request_id].append(output.finish_reason)

    def to_the_end(self) -> None:
        """Close the session, and step until nothing is left."""
        if "session" in self.scheduler.requests:
            self.scheduler.add_request(make_session_update("session", last=True))
        for _ in range(MAX_STEPS):
            if not self.scheduler.requests:
                return
            self.step()
        raise AssertionError(f"still there: {list(self.scheduler.requests)}")


def turns_that_stop(scheduler_cls: type | None, *, chunks_wait: bool, **config: Any) -> dict[str, list[Any]]:
    run = Run(scheduler_cls, **config)
    for turn in range(1, 4):
        if chunks_wait:  # the turn's first token cannot have come yet
            run.chunk(3 + turn)
        run.until(turns=turn)
        if not chunks_wait:
            for _ in range(2):  # the steps that were in flight when the turn ended
                run.step()
            run.chunk(3 + turn)
    run.until(turns=4)
    run.to_the_end()
    return run.heard


CHUNKS = pytest.mark.parametrize("chunks_wait", [False, True], ids=["chunks-later", "chunks-wait"])


@CHUNKS
@pytest.mark.parametrize("use_v2_model_runner", [False, True], ids=["v1", "v2"])
def test_a_stop_token_ends_a_turn_as_under_synchronous_scheduling(chunks_wait: bool, use_v2_model_runner: bool) -> None:
    expected = turns_that_stop(None, chunks_wait=chunks_wait, async_scheduling=False)
    stopped = [reason for reason in expected["session"] if reason is FinishReason.STOP]
    assert len(stopped) > 1
    heard = turns_that_stop(OmniScheduler, chunks_wait=chunks_wait, use_v2_model_runner=use_v2_model_runner)
    assert heard == expected


@CHUNKS
def test_vllms_own_scheduler_delivers_too_much_where_ours_mends_it(chunks_wait: bool) -> None:
    """Once no supported vLLM does, `_drop_output_in_flight` can go."""
    expected = turns_that_stop(None, chunks_wait=chunks_wait, async_scheduling=False)
    try:
        heard = turns_that_stop(AsyncScheduler, chunks_wait=chunks_wait)
    except AssertionError:
        heard = None
    assert (heard != expected) is compat.delivers_output_after_stop()


@pytest.mark.parametrize("waits", [False, True], ids=["chunk-later", "chunk-waits"])
@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_an_update_that_is_too_long_ends_its_session_alone(waits: bool, async_scheduling: bool) -> None:
    """6 tokens and 5 answers, of which the last is replaced: 13 more leave room for one token, 14 for none."""
    reasons = {}
    for num_tokens in (13, 14):
        run = Run(OmniScheduler, async_scheduling=async_scheduling, max_model_len=MAX_MODEL_LEN)
        if waits:
            run.chunk(num_tokens)
        run.until(turns=1)
        assert run.heard["session"][:6] == [500, 501, 502, 503, END_TOKEN, FinishReason.STOP]
        if not waits:
            run.chunk(num_tokens)
        run.until(turns=2)
        reasons[num_tokens] = run.heard["session"][-1]
        assert ("session" in run.scheduler.requests) is (num_tokens == 13)
        run.to_the_end()
        assert len(run.heard["beside"]) == MAX_MODEL_LEN - 5 + 1
        assert run.scheduler.num_waiting_for_streaming_input == 0
    assert reasons == {13: FinishReason.LENGTH, 14: FinishReason.ERROR}
