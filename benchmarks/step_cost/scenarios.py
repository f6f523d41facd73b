"""The scenarios: thin loops over `vllm_omni_sched.testing`, timed by the CPU time of this thread.

A scenario is prepared once for one scheduler class and one size n, then asked for samples as often as one likes; making
requests and model outputs is never in the measured time. Items are one token long and all different.
"""

from __future__ import annotations

import cProfile
import gc
import io
import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from vllm.v1.request import Request, RequestStatus

from vllm_omni_sched.testing import make_item, make_request, make_runner_output, make_scheduler, make_session_update
from vllm_omni_sched.testing.steps import sample_by_position

STEP_TOKENS = 8192
ENDLESS = 1 << 19  # output tokens no run reaches


class Stopwatch:
    """CPU seconds of this thread, summed over the sections in which it ran."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.profiler: cProfile.Profile | None = None  # when set, sees the timed sections and nothing else

    @contextmanager
    def __call__(self) -> Iterator[None]:
        if self.profiler is not None:
            self.profiler.enable()
        started = time.thread_time()
        yield
        self.seconds += time.thread_time() - started
        if self.profiler is not None:
            self.profiler.disable()


class Scenario(ABC):
    """Base class with a scheduler, a stopwatch and `sample()`; `message_bytes()` is measured where it exists."""

    name: ClassVar[str]
    config: ClassVar[dict[str, Any]] = {}

    def __init__(
        self, scheduler_cls: type | None, size: int, *, async_scheduling: bool = True, runner_v2: bool = False
    ):
        self.size = size
        self.timed = Stopwatch()
        self.taken = 0.0
        self.make_scheduler: Callable[[], Any] = lambda: make_scheduler(
            scheduler_cls,
            async_scheduling=async_scheduling,
            use_v2_model_runner=runner_v2,
            **{"num_blocks": 40_000, "max_num_batched_tokens": STEP_TOKENS, **self.config},
        )
        self.scheduler = self.make_scheduler()
        self.prepare()
        gc.collect()

    def prepare(self) -> None:  # noqa: B027 - most need none
        """Bring the scheduler into the state that is measured."""

    @abstractmethod
    def sample(self) -> float:
        """Take one more measurement, in seconds of CPU time."""

    def close(self) -> None:
        """Let the scheduler give back what its requests hold."""
        self.scheduler.finish_requests(list(self.scheduler.requests), RequestStatus.FINISHED_ABORTED)

    def take(self) -> float:
        """Return the seconds on the stopwatch since the last call."""
        spent = self.timed.seconds - self.taken
        self.taken = self.timed.seconds
        return spent

    def step(self) -> Any:
        """`schedule()` and `update_from_output()`, both timed; returns the scheduler output."""
        with self.timed():
            scheduled = self.scheduler.schedule()
        output = make_runner_output(self.scheduler, scheduled, sample_by_position)
        with self.timed():
            self.scheduler.update_from_output(scheduled, output)
        return scheduled

    def prefill(self, *requests: Request) -> None:
        """Add and step until every prompt has been computed."""
        for request in requests:
            with self.timed():
                self.scheduler.add_request(request)
        while any(request.num_computed_tokens < request.num_prompt_tokens for request in requests):
            self.step()


class Sessions(Scenario):
    """Base class with `sessions`, each of which holds n items and has been resumed before."""

    sessions: ClassVar[tuple[str, ...]]

    def prepare(self) -> None:
        self.frames = 0
        for session in self.sessions:
            self.prefill(whole_request(session, self.size, resumable=True, max_tokens=1))
        for _ in range(3):
            self.frame()
        self.take()

    def frame(self) -> Any:
        """Give each session one frame more, in one step; only the scheduler's work is timed."""
        self.frames += 1
        updates = [
            make_session_update(session, 1, [make_item(0, 1, f"{session}/frame-{self.frames}")], max_tokens=1)
            for session in self.sessions
        ]
        for update in updates:
            with self.timed():
                self.scheduler.add_request(update)
        scheduled = self.step()
        assert len(scheduled.num_scheduled_tokens) == len(self.sessions), "a session was not resumed"
        return scheduled

    def sample(self) -> float:
        self.frame()
        return self.take()


class RealtimeFrame(Sessions):
    """One session that holds n items gets one more: add, schedule, update."""

    name = "realtime_frame"
    sessions = ("session",)

    def message_bytes(self) -> int:
        """Return the size of the message of one more session update, pickled as vLLM's MessageQueue does."""
        size = message_bytes(self.frame())
        self.take()
        return size


class ManySessions(Sessions):
    """64 sessions of n items each, one frame each: one round."""

    name = "many_sessions"
    sessions = tuple(f"session-{i}" for i in range(64))
    config: ClassVar[dict[str, Any]] = {"max_num_seqs": 64}


class Decode(Scenario):
    """A request whose prompt held n items decodes one token: schedule, update."""

    name = "decode"

    def prepare(self) -> None:
        self.prefill(whole_request("a", self.size, max_tokens=ENDLESS))
        self.step()
        self.take()

    def sample(self) -> float:
        self.step()
        return self.take()


class OneShotPrefill(Scenario):
    """A prompt of n items from add to its first token, all steps."""

    name = "one_shot_prefill"

    def prepare(self) -> None:
        self.requests = 0

    def sample(self) -> float:
        self.requests += 1
        self.prefill(whole_request(f"request-{self.requests}", self.size, max_tokens=1))
        return self.take()


class Abort(Scenario):
    """A request of n items is aborted while min(n, 8192) of them are in the encoder cache."""

    name = "abort"

    def prepare(self) -> None:
        self.requests = 0

    def sample(self) -> float:
        self.scheduler = self.make_scheduler()  # the last step's output never came back
        self.requests += 1
        request = whole_request(f"request-{self.requests}", self.size, max_tokens=ENDLESS)
        self.scheduler.add_request(request)
        self.scheduler.schedule()
        with self.timed():
            self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
        return self.take()


class OneChunk(Scenario):
    """Times the schedule() of one 64-token chunk while n items wait behind it."""

    name = "one_chunk"
    config: ClassVar[dict[str, Any]] = {"max_num_batched_tokens": 64}

    def prepare(self) -> None:
        self.requests = 0

    def sample(self) -> float:
        self.requests += 1
        request = whole_request(f"request-{self.requests}", self.size, max_tokens=ENDLESS)
        self.scheduler.add_request(request)
        with self.timed():
            scheduled = self.scheduler.schedule()
        spent = self.take()
        self.scheduler.update_from_output(scheduled, make_runner_output(self.scheduler, scheduled, sample_by_position))
        self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
        self.take()
        return spent


class TextDecode(Scenario):
    """64 plain text requests decode one token each."""

    name = "text_decode"
    config: ClassVar[dict[str, Any]] = {"max_num_seqs": 64, "num_blocks": 200_000}

    def prepare(self) -> None:
        self.prefill(*(make_request(f"text-{i}", 512, max_tokens=ENDLESS) for i in range(self.size)))
        self.step()
        self.take()

    def sample(self) -> float:
        self.step()
        return self.take()


class TextPrefill(Scenario):
    """64 plain text prompts of 512 tokens from add to the first token, and gone again."""

    name = "text_prefill"
    config: ClassVar[dict[str, Any]] = {"max_num_seqs": 64}

    def prepare(self) -> None:
        self.rounds = 0

    def sample(self) -> float:
        self.rounds += 1
        self.prefill(*(make_request(f"text-{self.rounds}-{i}", 512, max_tokens=1) for i in range(self.size)))
        assert not self.scheduler.requests
        return self.take()


SCENARIOS: dict[str, type[Scenario]] = {
    scenario.name: scenario
    for scenario in (
        RealtimeFrame, Decode, OneShotPrefill, Abort, OneChunk, ManySessions, TextDecode, TextPrefill,
    )
}  # fmt: skip


def whole_request(request_id: str, num_items: int, **options: Any) -> Request:
    """Return a request whose prompt has `num_items` tokens, every one an item of its own."""
    return make_request(
        request_id, num_items, [make_item(i, 1, f"{request_id}/{i}") for i in range(num_items)], **options
    )


def message_bytes(scheduled: Any) -> int:
    """Bytes that the workers are sent for one step: the pickle and its out-of-band buffers."""
    import torch
    from vllm.distributed.device_communicators import shm_broadcast

    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, protocol=5, buffer_callback=buffers.append)
    reduce_tensor: Callable[..., Any] | None = getattr(shm_broadcast, "_reduce_tensor", None)
    if reduce_tensor is not None:  # newer versions send tensors out of band
        pickler.dispatch_table = {torch.Tensor: reduce_tensor}
    # What the executor enqueues: method, args, kwargs, output rank
    pickler.dump(("execute_model", (scheduled,), {}, 0))
    return stream.tell() + sum(buffer.raw().nbytes for buffer in buffers)
