"""A session that is preempted while the token that ends its turn is in flight goes on with its next chunk."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.request import RequestStatus

from vllm_omni_sched import OmniScheduler, compat
from vllm_omni_sched.testing import make_item, make_request, make_scheduler, make_session_update, run_step

MAX_STEPS = 50
TURN = 3
FIRST = [101, 102, 103, 104, 105, 106]
NEXT = [201, 202, 203, 204]


def tokens_of(request: Any, position: int) -> int:
    return 500 + position


class Run:
    """One session on a scheduler that has blocks for everybody; it is preempted by hand."""

    def __init__(self, scheduler_cls: type, *, policy: str, caching: bool, v2: bool = False, chunk_waits: bool) -> None:
        options = {"metrics": False} if scheduler_cls is not AsyncScheduler else None
        self.scheduler: Any = make_scheduler(
            scheduler_cls,
            policy=policy,
            block_size=4,
            enable_prefix_caching=caching,
            use_v2_model_runner=v2,
            options=options,
        )
        self.scheduler.add_request(self.chunk(FIRST, "first", make_request))
        self.session = self.scheduler.requests["s"]
        self.chunk_waits = chunk_waits

    def chunk(self, tokens: list[int], item: str, make: Any) -> Any:
        items = [make_item(0, 2, item)]
        how = {"prompt_token_ids": tokens, "max_tokens": TURN, "block_size": 4, "ignore_eos": True}
        return make("s", len(tokens), items, **({"resumable": True} if make is make_request else {}), **how)

    def preempt_at_the_end_of_the_turn(self) -> None:
        """Run up to where the last token of the turn is in flight, and take the session's blocks away."""
        while self.session.num_output_tokens + self.session.num_output_placeholders < TURN:
            run_step(self.scheduler, tokens_of)
        self.scheduler.running.remove(self.session)
        self.scheduler._preempt_request(self.session, 0.0)
        if self.chunk_waits:
            self.next_chunk()
        run_step(self.scheduler, tokens_of)

    def next_chunk(self) -> None:
        self.scheduler.add_request(self.chunk(NEXT, "next", make_session_update))

    def answer(self) -> list[int] | None:
        """What the session samples in its second turn; None when it gets no step."""
        sampled: list[int] = []
        for _ in range(MAX_STEPS):
            for outputs in (run_step(self.scheduler, tokens_of).outputs or {}).values():
                for output in outputs.outputs:
                    sampled += output.new_token_ids
                    if output.finish_reason is not None:
                        return sampled
        return None


KINDS = pytest.mark.parametrize("policy", ["fcfs", "priority"])
CACHING = pytest.mark.parametrize("caching", [False, True], ids=["", "prefix-caching"])
CHUNK = pytest.mark.parametrize("chunk_waits", [False, True], ids=["chunk-later", "chunk-waits"])


@KINDS
@CACHING
@CHUNK
@pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])
def test_it_goes_on(policy: str, caching: bool, chunk_waits: bool, v2: bool) -> None:
    run = Run(OmniScheduler, policy=policy, caching=caching, chunk_waits=chunk_waits, v2=v2)
    run.preempt_at_the_end_of_the_turn()
    if not chunk_waits:
        assert run.session.status is RequestStatus.WAITING_FOR_STREAMING_REQ
        assert compat.is_queued(run.scheduler, run.session)
        run.next_chunk()
    kept = [*FIRST, 500, 501, *NEXT]  # all but the last sampled token, as for a session that keeps its blocks
    assert list(run.session.prompt_token_ids) == kept
    assert run.session._all_token_ids[: len(kept)] == kept
    assert [feature.mm_position.offset for feature in run.session.mm_features] == [0, len(kept) - len(NEXT)]
    assert len(run.session.block_hashes) == len(kept) // 4 * caching or not caching
    assert run.answer() == [500, 501, 502]
    assert run.scheduler.num_waiting_for_streaming_input == 1
    run.scheduler.add_request(make_session_update("s", last=True))
    run_step(run.scheduler, tokens_of)
    assert not run.scheduler.requests


@KINDS
def test_it_can_be_aborted(policy: str) -> None:
    run = Run(OmniScheduler, policy=policy, caching=True, chunk_waits=False)
    run.preempt_at_the_end_of_the_turn()
    run.scheduler.finish_requests("s", RequestStatus.FINISHED_ABORTED)
    assert not run.scheduler.requests
    assert not compat.is_queued(run.scheduler, run.session)
    assert run.scheduler.num_waiting_for_streaming_input == 0


@CACHING
@CHUNK
def test_vllms_own_scheduler_loses_it_where_ours_mends_it(caching: bool, chunk_waits: bool) -> None:
    """Once no supported vLLM does, `StrandedSessionsMixin` can go."""
    run = Run(AsyncScheduler, policy="fcfs", caching=caching, chunk_waits=chunk_waits)
    run.preempt_at_the_end_of_the_turn()
    if not chunk_waits:
        run.next_chunk()
    assert (run.answer() is None) is compat.strands_preempted_sessions()
