"""Merging against a plain model: who joins leaves once or is finished once, and the oldest follower takes over."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from vllm_omni_sched.graph.merging import Merger, MergeReason, Role


@dataclass(eq=False)
class Group:
    key: str | None
    members: list[str]  # leader first, then as they came
    takes_more: bool = True


class Merging(RuleBasedStateMachine):
    @initialize(max_followers=st.integers(1, 3))
    def begin(self, max_followers: int) -> None:
        self.merger = Merger(max_followers)
        self.limit, self.number = max_followers, 0
        self.groups: list[Group] = []
        self.joined: set[str] = set()
        self.done: list[str] = []  # left or finished

    def group_of(self, which: int) -> tuple[str, Group | None]:
        request_id = f"r{which % (self.number + 1)}"  # now and then one that never was
        return request_id, next((group for group in self.groups if request_id in group.members), None)

    @rule(key=st.sampled_from([None, "x", "y"]))
    def join(self, key: str | None) -> None:
        new = f"r{self.number}"
        self.number += 1
        self.joined.add(new)
        result = self.merger.join(key, new)
        if key is None:
            assert result == (Role.ALONE, new, MergeReason.NOT_MERGEABLE)
            self.groups.append(Group(None, [new]))
            return
        taking = [group for group in self.groups if group.key == key and group.takes_more]
        assert len(taking) <= 1
        reason = MergeReason.NEW
        for group in taking:
            if len(group.members) <= self.limit:
                assert result == (Role.FOLLOW, group.members[0], MergeReason.SAME_WORK)
                group.members.append(new)
                return
            reason = MergeReason.FULL
            group.takes_more = False
        assert result == (Role.LEAD, new, reason)
        self.groups.append(Group(key, [new]))

    @rule(which=st.integers(0, 30))
    def leave(self, which: int) -> None:
        request_id, group = self.group_of(which)
        role, promoted = self.merger.leave(request_id)
        if group is None:
            assert (role, promoted) == (None, None)
            return
        led = group.members[0] == request_id
        group.members.remove(request_id)
        self.done.append(request_id)
        if not led:
            assert (role, promoted) == (Role.FOLLOW, None)
        else:
            assert role is (Role.ALONE if group.key is None else Role.LEAD)
            assert promoted == (group.members[0] if group.members else None)
        if not group.members:
            self.groups.remove(group)

    @rule(which=st.integers(0, 30))
    def finish(self, which: int) -> None:
        request_id, group = self.group_of(which)
        told = self.merger.finish(request_id)
        if group is None or group.members[0] != request_id:
            assert told == ()
            return
        assert told == tuple(group.members[1:])
        self.done += group.members
        self.groups.remove(group)

    @invariant()
    def everybody_is_in_one_place(self) -> None:
        here = [one for group in self.groups for one in group.members]
        assert sorted(here + self.done) == sorted(self.joined)
        assert len(self.merger) == len(here)
        for group in self.groups:
            assert self.merger.members(group.members[0]) == tuple(group.members)
            assert all(self.merger.members(follower) == () for follower in group.members[1:])


Merging.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestMerging = Merging.TestCase
