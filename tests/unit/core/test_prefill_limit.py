"""A latency target under load: as many prompts are computed at once as meet it, and requests that decode do not count.

The engine is simulated: prompts share its time, so that the first output of each comes later the more there are.
"""

from __future__ import annotations

import itertools
from collections import deque
from statistics import mean

import pytest

from tests.support.core import Line
from vllm_omni_sched.config.stage_yaml import read_stage_options
from vllm_omni_sched.core.pipeline import events as e
from vllm_omni_sched.graph.stages import StageKind

TARGET = 0.05
ARTICLE = {"latency_target": "50ms"}
"""Options of the design article that are not defaults: 1 to 32 requests and a decision each second are."""
CLIENTS = 120  # more than the stage runs: each asks again when it is answered
SLOTS = 96


class Engine:
    """A stage and its engine, which computes the prompts of all requests in its slots at an equal share of its time.

    ``alone_seconds``: of one prompt. ``decode_seconds``: from the first output to the last.
    """

    def __init__(self, alone_seconds: float, decode_seconds: float) -> None:
        self.line = Line(StageKind.AR, at_once=SLOTS, batching=read_stage_options(ARTICLE, "here").batching)
        self.alone_seconds, self.decode_seconds = alone_seconds, decode_seconds
        self.queued: deque[str] = deque()  # in the engine, without a slot
        self.left: dict[str, float] = {}  # seconds of its prompt that are left
        self.ends: dict[str, float] = {}  # of those that decode
        self.began: dict[str, float] = {}
        self.numbers = itertools.count()
        for _ in range(CLIENTS):
            self._ask()

    @property
    def limit(self) -> int:
        control = self.line.core.stages[0].replicas[0].load.control
        assert control is not None
        return control.limit

    def _ask(self) -> None:
        self._start(self.line.come(f"{next(self.numbers)}"))

    def _start(self, started: list[str]) -> None:
        for one in started:
            name = one.partition("@")[0]
            self.began[name] = self.line.now
            self.queued.append(name)

    def run(self, seconds: float) -> list[tuple[int, int, int, float]]:
        """Return, for each first output, the limit, the prompts in progress, the requests that decode, and its time."""
        line, found = self.line, []
        until = line.now + seconds
        while line.now < until:
            while self.queued and len(self.left) + len(self.ends) < SLOTS:
                self.left[self.queued.popleft()] = self.alone_seconds
            computed = min(self.left.values(), default=float("inf"))
            end = min(self.ends.values(), default=float("inf"))
            at = min(line.now + computed * len(self.left), end) if self.left else end
            share = (at - line.now) / max(len(self.left), 1)
            for name in self.left:
                self.left[name] -= share
            line.now = at
            for name in [name for name, left in self.left.items() if left < 1e-9]:
                in_progress = len(self.left) + len(self.queued)
                assert in_progress <= 32
                found.append((self.limit, in_progress, len(self.ends), at - self.began.pop(name)))
                del self.left[name]
                self.ends[name] = at + self.decode_seconds
                line.tell(e.FirstOutput(0, name))
            for name in [name for name, end in self.ends.items() if end <= at]:
                del self.ends[name]
                line.finish(name)
                line.tell(e.Left(name))
                self._ask()
            self._start(line.tick())
        return found


def check_converged(engine: Engine) -> None:
    """Check that the target is met on average, by a limit that is near the best one and swings by little."""
    found = engine.run(6)
    best = TARGET / engine.alone_seconds
    assert mean(seconds for *_, seconds in found) == pytest.approx(TARGET, rel=0.2)
    assert all(best / 1.3 - 1 <= limit <= best * 1.3 + 1 for limit, *_ in found)
    assert all(in_progress <= limit + 1 for limit, in_progress, *_ in found)


@pytest.mark.parametrize("alone_seconds", [0.007, 0.02])
def test_the_limit_converges_to_as_many_prompts_as_meet_the_target(alone_seconds: float) -> None:
    engine = Engine(alone_seconds, decode_seconds=0.3)
    assert engine.limit == 32
    engine.run(12)
    check_converged(engine)


def test_a_target_that_is_out_of_reach_leaves_one_prompt_at_a_time() -> None:
    engine = Engine(alone_seconds=0.2, decode_seconds=0.2)
    engine.run(60)
    assert {(limit, in_progress) for limit, in_progress, *_ in engine.run(5)} == {(1, 1)}
