"""Whatever comes, `MemoryLending` preempts nobody, returns everything, and lets every encode and every request run."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_omni_sched.resource.engine.lending import EncodeDemand, LendingReason, LendingSnapshot, MemoryLending

SETTINGS = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
TOTAL, STEP_SECONDS, ENCODE_STEPS = 100, 0.1, 3


@st.composite
def snapshots(draw: st.DrawFn) -> LendingSnapshot:
    lent = draw(st.integers(0, TOTAL))
    loans = sorted(draw(st.lists(st.integers(0, TOTAL), max_size=4)))
    requests = sorted(draw(st.lists(st.integers(0, TOTAL), min_size=len(loans), max_size=len(loans))))
    return LendingSnapshot(
        TOTAL,
        draw(st.integers(0, TOTAL - lent)),
        lent,
        draw(st.integers(0, lent)),
        draw(st.integers(0, TOTAL)),
        tuple(map(EncodeDemand, loans, requests)),
        draw(st.booleans()),
    )


@SETTINGS
@given(st.floats(0.0, 0.9), st.lists(st.tuples(st.floats(0.0, 3.0), snapshots()), max_size=10))
def test_each_plan_keeps_what_is_used_and_leaves_what_is_needed(
    most: float, history: list[tuple[float, LendingSnapshot]]
):
    lender, now = MemoryLending(most), 0.0
    for seconds, one in history:
        now += seconds
        plan = lender.plan(one, now)
        assert plan.blocks >= one.used_blocks
        new = plan.blocks - one.lent_blocks
        if new > 0:
            assert new <= one.free_blocks - one.needed_blocks
            assert plan.blocks <= lender.bound(TOTAL)
        missing = one.needed_blocks - one.free_blocks
        if missing > 0:  # what is idle is given back, as far as it is needed
            assert plan.blocks <= max(one.used_blocks, one.lent_blocks - missing)
        assert plan.admits or plan.reason is LendingReason.SAVING
        begins = one.demands[plan.begins - 1].loan_blocks if plan.begins else 0
        assert begins <= plan.blocks
        assert begins <= max(0, one.room), "encodes begin in what running requests will need"


@dataclass
class _Request:
    blocks: int
    grows: int
    steps: int


@dataclass
class _World:
    """An engine whose requests hold blocks, grow by one in each step up to a number, and end."""

    lender: MemoryLending
    waiting: list[_Request]
    encodes: list[int]
    running: list[_Request] = field(default_factory=list)
    lent: int = 0
    used: int = 0
    left: int = 0  # steps of the encode under way
    now: float = 0.0

    @property
    def free(self) -> int:
        return TOTAL - self.lent - sum(one.blocks for one in self.running)

    def step(self) -> None:
        needed = sum(one.grows for one in self.running)
        blocked = bool(self.waiting) and self.waiting[0].blocks > self.free - needed
        demands = tuple(EncodeDemand(max(self.used, *self.encodes[: i + 1])) for i in range(len(self.encodes[:3])))
        plan = self.lender.plan(
            LendingSnapshot(TOTAL, self.free, self.lent, self.used, needed, demands, blocked), self.now
        )
        assert plan.blocks >= self.used
        self.lent = plan.blocks
        assert self.free >= needed, "running requests would be preempted"
        if demands and not self.left and plan.begins:
            self.used, self.left = self.encodes.pop(0), ENCODE_STEPS
        while plan.admits and self.waiting:
            first = self.waiting[0]
            if first.blocks + first.grows > self.free - needed:
                break
            needed += first.grows
            self.running.append(self.waiting.pop(0))
        for one in self.running:
            one.steps -= 1
            if one.grows:
                one.blocks, one.grows = one.blocks + 1, one.grows - 1
        self.running = [one for one in self.running if one.steps > 0]
        if self.left:
            self.left -= 1
            self.used = self.used if self.left else 0
        self.now += STEP_SECONDS


REQUESTS = st.builds(_Request, st.integers(1, 60), st.integers(0, 20), st.integers(1, 30))


@SETTINGS
@given(st.lists(REQUESTS, max_size=25), st.lists(st.integers(1, 50), max_size=12))
def test_nobody_is_preempted_nobody_starves_and_everything_returns(requests: list[_Request], encodes: list[int]):
    world = _World(MemoryLending(0.5, hold_seconds=0.5, patience_seconds=1.0), requests, encodes)
    longest = 40 * (len(requests) + len(encodes)) + 40
    steps = 0
    while world.waiting or world.running or world.encodes or world.left or world.lent:
        world.step()
        steps += 1
        assert steps < longest, "a request or an encode never ran"
