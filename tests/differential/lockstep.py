"""Two schedulers, one workload, step by step."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from vllm.v1.request import RequestStatus

from tests.differential.compare import (
    check_nothing_left,
    compare_engine_outputs,
    compare_messages,
    compare_states,
    compare_workers,
    is_stocks_own,
)
from tests.differential.side import STOCK, Candidate, Side
from tests.differential.workload import Workload
from tests.support.difference import Difference, first_difference

STALLED_STEPS = 6
"""So many steps without a token and without anything in flight: nothing will ever move again by itself."""


class Diverged(AssertionError):
    """The two schedulers differ; the message names the seed, the step, the field and both values."""


class StockFails(Exception):
    """Stock and ours raised the same error: this workload ends here."""


class Lockstep:
    """Runs `workload` on `stock` (or what stands for it) and on `ours`, and compares after each step.

    Stock's state decides what happens next (which request is aborted, which session goes on), and the same happens
    to both.
    """

    def __init__(self, workload: Workload, ours: Candidate, stock: Candidate = STOCK) -> None:
        self.workload = workload
        self.rng: random.Random = workload.rng
        self.stock = Side(workload.settings, workload.seed, stock)
        self.ours = Side(workload.settings, workload.seed, ours)
        self.sides = (self.stock, self.ours)
        self.step = 0
        self._sessions: dict[str, int] = {}  # open sessions, with the tokens they may still take
        self.counts: Counter[str] = Counter()

    def run(self) -> Counter[str]:
        """Raises `Diverged` at the first difference; else returns how much of everything happened."""
        try:
            self._run()
        except StockFails:
            self.counts["stock fails"] = 1
        finally:
            for side in self.sides:
                with contextlib.suppress(Exception):  # after a failure anything may be broken
                    side.close()
        if extension := getattr(self.ours.scheduler, "omni", None):
            metrics = extension.metrics
            self.counts.update(
                deltas=metrics.session_updates_delta,
                spilled=metrics.spilled_items,
                restored=metrics.restored_items,
                narrowed=metrics.windows_narrowed,
            )
        return self.counts

    def _run(self) -> None:
        for _ in range(self.workload.settings.num_steps):
            self._one_step(arrivals=True)
        for session in list(self._sessions):
            self._end_session(session)
        idle = 0
        while self._busy():
            moved = self._one_step(arrivals=False)
            idle = 0 if moved else idle + 1
            if idle > STALLED_STEPS:  # as on stock, where encoder-cache or block holders can wait for each other
                self._abort(next(iter(self.stock.scheduler.requests)))
        self._one_step(arrivals=False)  # tells the workers of the last ones that finished
        for side in self.sides:
            self._check(check_nothing_left(side))

    def _busy(self) -> bool:
        return bool(self.stock.scheduler.requests or self.stock.in_flight)

    def _one_step(self, *, arrivals: bool) -> bool:
        self.step += 1
        if arrivals:
            self._events()
        seen = self._both(Side.schedule)
        (stock_output, stock_answer), (our_output, our_answer) = seen
        self._check(compare_messages(stock_output, our_output))
        self._check(first_difference(stock_answer, our_answer, "model output"))
        self._check(compare_workers(*self.sides))
        self._count(stock_output)
        if arrivals and self.rng.random() < 0.3:
            self._events()  # the client does not wait for the step to end
        for outputs in self._updates(stock_output.total_num_scheduled_tokens):
            self._check(compare_engine_outputs(*outputs))
        self._check(compare_states(*self.sides))
        self._forget_finished_sessions()
        return bool(stock_output.total_num_scheduled_tokens or self.stock.in_flight)

    def _both(self, do: Callable[[Side], Any]) -> list[Any]:
        done: list[Any] = []
        errors: list[Exception | None] = []
        for side in self.sides:
            try:
                done.append(do(side))
                errors.append(None)
            except Exception as error:  # noqa: BLE001 (stock's may be of any kind)
                errors.append(error)
        if difference := first_difference(*map(repr, errors), do.__name__):
            raise self._diverged(difference) from errors[1] or errors[0]
        if any(errors):
            raise StockFails
        return done

    def _updates(self, num_scheduled_tokens: int) -> Iterator[list[dict[int, Any]]]:
        """Finish the steps in flight, all but the newest under async scheduling, as the engine core does."""
        async_scheduling = self.workload.settings.async_scheduling
        keep = 1 if async_scheduling and num_scheduled_tokens and self.rng.random() < 0.85 else 0
        while len(self.stock.in_flight) > keep:
            yield self._both(Side.update)

    def _events(self) -> None:
        scheduler, rng = self.stock.scheduler, self.rng
        while len(scheduler.requests) < 10 and rng.random() < 0.45:
            self._arrive()
        for session in list(self._sessions):
            if rng.random() < 0.35:
                self._continue_session(session)
        if scheduler.requests and rng.random() < 0.04:
            self._abort(rng.choice(list(scheduler.requests)))
        if rng.random() < 0.015:
            # Stock raises when sessions between two turns hold blocks.
            running = not any(r.num_computed_tokens for r in scheduler.requests.values() if r not in scheduler.running)
            results = [side.scheduler.reset_prefix_cache(reset_running_requests=running) for side in self.sides]
            self._check(first_difference(*results, "reset_prefix_cache"))
        if rng.random() < 0.01 and not any(r.mm_features for r in scheduler.running):
            for side in self.sides:
                side.reset_encoder_cache()

    def _arrive(self) -> None:
        resumable = self.rng.random() < 0.35
        settings = self.workload.settings
        capacity = settings.capacity
        limit = min(capacity, self.rng.choice((60, 150, 400) if settings.many_items else (20, 60, 150)))
        chunk = self.workload.new_chunk(None, limit, resumable=resumable, now=self.step)
        if chunk is None:
            return
        self._add(chunk)
        if resumable:
            self._sessions[chunk.request_id] = capacity - len(chunk.tokens) - chunk.max_tokens

    def _continue_session(self, session: str) -> None:
        budget = min(
            self._sessions[session], self.rng.choice((8, 40, 150) if self.workload.settings.many_items else (3, 8, 40))
        )
        chunk = self.workload.new_chunk(session, budget, resumable=True, now=self.step)
        if chunk is None or self.rng.random() < 0.04:
            self._end_session(session)
            return
        self._sessions[session] -= len(chunk.tokens) + chunk.max_tokens
        self.counts["updates"] += 1
        self._add(chunk)

    def _end_session(self, session: str) -> None:
        del self._sessions[session]
        if session in self.stock.scheduler.requests:
            chunk = self.workload.new_chunk(session, 2, resumable=False, now=self.step)
            assert chunk is not None
            self._add(chunk)

    def _add(self, chunk: Any) -> None:
        for side in self.sides:
            side.add(chunk.build(self.workload.settings.block_size))

    def _abort(self, request_id: str) -> None:
        self.counts["aborts"] += 1
        self._sessions.pop(request_id, None)
        for side in self.sides:
            side.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def _forget_finished_sessions(self) -> None:
        for session in self._sessions.keys() - self.stock.scheduler.requests.keys():
            del self._sessions[session]

    def _count(self, output: Any) -> None:
        self.counts["tokens"] += output.total_num_scheduled_tokens
        self.counts["encodes"] += sum(map(len, output.scheduled_encoder_inputs.values()))
        self.counts["preemptions"] += len(output.preempted_req_ids or ())
        self.counts["stock lacks data"] += sum(
            not is_stocks_own(self.stock, complaint) for complaint in self.stock.worker.complaints
        )
        self.counts["evictions"] += len(output.free_encoder_mm_hashes)
        self.counts["prefix"] += sum(
            new.num_computed_tokens for new in output.scheduled_new_reqs if new.req_id not in self._sessions
        )

    def _check(self, difference: Difference | None) -> None:
        if difference is not None:
            raise self._diverged(difference)

    def _diverged(self, difference: Difference) -> Diverged:
        return Diverged(
            f"seed {self.workload.seed}, step {self.step}, {difference}\n"
            f"  under {self.workload.settings}\n"
            f"  with {self.workload.options}\n"
            f"  again: python -m tests.differential {self.workload.seed}"
        )


def run_seed(
    seed: int,
    scheduler_cls: type | None,
    *,
    options: dict[str, Any] | None = None,
    against: Candidate = STOCK,
    **overrides: Any,
) -> Counter[str]:
    """Run a workload on stock and on `scheduler_cls` (None: stock again), with `overrides` of its `Settings`.

    `options` are ours (`additional_config["omni_sched"]`); None takes those that the seed draws.
    """
    workload = Workload(seed, **overrides)
    ours = Candidate(scheduler_cls, workload.options if options is None else options)
    return Lockstep(workload, ours, against).run()
