"""Credits on any graph: conserved at every step of a random walk, and never a deadlock."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni_sched.resource.pipeline.credits import Credits


class Walk:
    """Requests on their way through a random graph; each stage of a request starts when all before it have ended."""

    def __init__(self, rng: random.Random, num_stages: int, num_requests: int) -> None:
        names = [f"s{i}" for i in range(num_stages)]
        rng.shuffle(names)
        density = rng.random()
        self.graph = {a: [b for b in names[i + 1 :] if rng.random() < density] for i, a in enumerate(names)}
        most = rng.choice([1, 1, 3])
        self.capacity = {name: rng.randint(1, most) for name in names}
        self.credits = Credits(self.graph, self.capacity)
        self.rng, self.names = rng, names
        self.path = {}
        for number in range(num_requests):
            entry = names[0] if rng.random() < 0.8 else rng.choice(names)
            path = {entry}
            for name in names:  # in the order of the graph
                if any(name in self.graph[one] for one in path) and rng.random() < 0.9:
                    path.add(name)
            self.path[f"r{number}"] = path
        self.running: set[tuple[str, str]] = set()
        self.done: dict[str, set[str]] = {name: set() for name in self.path}
        self.ended: set[str] = set()
        self.holds: dict[str, set[str]] = {name: set() for name in self.path}
        self.needed: dict[str, dict[str, tuple[str, ...]]] = {name: {} for name in self.path}

    def ready(self) -> list[tuple[str, str]]:
        """What would start, if there is credit."""
        return [
            (name, stage)
            for name, path in self.path.items()
            if name not in self.ended
            for stage in sorted(path)
            if stage not in self.done[name]
            and (name, stage) not in self.running
            and all(one in self.done[name] for one in path if stage in self.graph[one])
        ]

    def start(self, name: str, stage: str) -> bool:
        call = (stage, name, self.path[name])
        before = {one: self.credits.free(one) for one in self.names}
        needed = self.credits.needed(*call)
        # others do not change it
        assert self.needed[name].setdefault(stage, needed) == needed
        taken = self.credits.take(*call)
        assert taken == all(before[one] > 0 for one in needed)
        if not taken:
            assert before == {one: self.credits.free(one) for one in self.names}
        else:
            self.running.add((name, stage))
            self.needed[name].clear()
            # reserved at the start: all successors, and itself
            self.holds[name] |= {stage, *(one for one in self.graph[stage] if one in self.path[name])}
        return taken

    def end(self, name: str, stage: str) -> None:
        self.running.discard((name, stage))
        self.done[name].add(stage)
        self.needed[name].clear()
        for after in self.graph[stage]:
            self.credits.hand_over(name, stage, after)
        self.credits.give_back(name, stage)
        self.holds[name].discard(stage)
        if self.done[name] == self.path[name]:
            self.ended.add(name)

    def abort(self, name: str) -> None:
        self.running = {(one, stage) for one, stage in self.running if one != name}
        self.credits.give_back(name)
        self.holds[name].clear()
        self.ended.add(name)

    def check(self) -> None:
        for one in self.names:
            assert self.credits.free(one) >= 0
            held = sum(one in holds for holds in self.holds.values())
            assert self.credits.free(one) <= self.capacity[one] - held, "rule 4 may take more"

    def step(self, abort: float) -> bool:
        """One random thing; False if nothing at all can happen any more."""
        ready = self.ready()
        self.rng.shuffle(ready)
        if self.rng.random() < abort and (left := sorted(self.path.keys() - self.ended)):
            self.abort(self.rng.choice(left))
            return True
        if self.running and self.rng.random() < 0.4:
            self.end(*self.rng.choice(sorted(self.running)))
            return True
        if any(self.start(*one) for one in ready):
            return True
        if self.running:
            self.end(*self.rng.choice(sorted(self.running)))
            return True
        return False


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 8), st.integers(1, 8), st.sampled_from([0.0, 0.05]))
def test_all_requests_end_and_all_credit_comes_back(seed, num_stages, num_requests, abort):
    walk_through(Walk(random.Random(seed), num_stages, num_requests), abort)


def test_where_many_branches_meet_nobody_waits_for_ever():
    """Without rule 4, one of these hundred walks ends in a deadlock, and the example of the unit tests."""
    for seed in range(100):
        walk_through(Walk(random.Random(seed), 12, 12), abort=0.0, check=False)


def walk_through(walk: Walk, abort: float, check: bool = True) -> None:
    while walk.step(abort):
        if check:
            walk.check()
    assert walk.ended == walk.path.keys()  # no deadlock: nothing can happen only when there is nothing left to do
    assert {one: walk.credits.free(one) for one in walk.names} == walk.capacity
